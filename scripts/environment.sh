# Sourced by scripts/serve and scripts/test: makes .venv with lightserve in it, once.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  printf '%s: %s\n' "$0" "$1" >&2
  exit 1
}

# The first Python of a supported version that can make environments.
find_python() {
  local candidate too_old="" no_venv=""
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3.11 python3 python; do
    "$candidate" -c '' 2>/dev/null || continue
    if ! "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
      too_old="$candidate is $("$candidate" -c 'import platform; print(platform.python_version())')"
    elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      no_venv=$candidate
    else
      printf '%s' "$candidate"
      return
    fi
  done
  [ -z "$no_venv" ] || fail "$no_venv has no venv module; on Debian and Ubuntu: apt install $no_venv-venv"
  fail "needs Python 3.11, 3.12 or 3.13${too_old:+ ($too_old)}; PYTHON=/path/to/python names one"
}

# What an installation depends on: when it changes, install again.
fingerprint() {
  { echo "$root"; cat "$root/pyproject.toml" "$root/constraints.txt"; } | cksum
}

has_environment() {
  "$root/.venv/bin/python" -m pip --version >/dev/null 2>&1
}

# Usage: ensure_environment serve|test
ensure_environment() {
  local stamp="$root/.venv/.installed-$1" extra=""
  [ "$1" = serve ] || extra="[$1]"
  # Several starts at once on a fresh clone: the first installs, the others wait.
  exec 9<"$root/scripts"
  command -v flock >/dev/null && flock 9
  if [ "$(cat "$stamp" 2>/dev/null)" != "$(fingerprint)" ] || ! "$root/.venv/bin/python" -c '' 2>/dev/null; then
    install_environment "$extra"
    fingerprint >"$stamp"
    fingerprint >"$root/.venv/.installed-serve" # whatever was asked for, lightserve is there
  fi
  exec 9<&-
}

install_environment() {
  local python
  if ! has_environment; then
    python=$(find_python) || exit 1
    echo "making $root/.venv with $python" >&2
    "$python" -m venv --clear "$root/.venv" || fail "cannot make $root/.venv"
  fi
  "$root/.venv/bin/python" -m pip install --disable-pip-version-check --constraint "$root/constraints.txt" --editable "$root$1" >&2 ||
    fail "installation failed, see above; the first start needs a network"
}
