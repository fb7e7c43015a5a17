"""Quality of what a server or plan answers: text, tasks, a sandbox for code, intervals."""
