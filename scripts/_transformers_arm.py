"""The transformers side of scripts/bench_engine: greedy generation on the CPU, on command.

Runs in an environment with torch and transformers, none of which polyjax depends on. Reads a JSON
line {"prompt": [ids], "tokens": n} and answers {"seconds": s, "tokens": [ids]}.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    model_dir, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"ready": True, "versions": versions}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompt = torch.tensor([order["prompt"]])
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=order["tokens"],
                min_new_tokens=order["tokens"],
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        answer = {"seconds": seconds, "tokens": out[0, prompt.shape[1] :].tolist()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
