# Sourced by scripts/serve and scripts/test: finds Python 3.12 and makes the environment.
# Sets `root` (the checkout) and `venv_python`. Usage: prepare_environment serve|test

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv_python=${POLYJAX_VENV:-$root/.venv}/bin/python

find_python() {
  # From the checkout, because version managers read its .python-version.
  for candidate in ${POLYJAX_PYTHON:-} python3.12 python3 python; do
    found=$(cd "$root" && "$candidate" -c \
      'import sys; print(sys.executable); sys.exit(sys.version_info[:2] != (3, 12))' \
      2>/dev/null) && echo "$found" && return
  done
  return 1
}

prepare_environment() {
  python=$(find_python) || {
    echo "polyjax needs Python 3.12 and found none on PATH." >&2
    echo "Install it (Debian, Ubuntu: apt install python3.12 python3.12-venv; macOS: brew install" \
      "python@3.12), or name it: POLYJAX_PYTHON=/path/to/python3.12 $0" >&2
    exit 1
  }
  "$python" "$root/scripts/_environment.py" "$1"
}
