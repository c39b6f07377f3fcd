#!/usr/bin/env bash
# Everything worth knowing from a machine with a GPU, in under 8 minutes: is it right, does it touch
# memory it should not, how fast is it. Each part writes a file and has its own time limit; a part
# that fails does not stop the others, but the exit status says so.
#
#   benchmarks/gpu_check.sh [FOLDER]     out/gpu by default; the package is built already
#   PYTHON=python3.11 benchmarks/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/.."
export out=${1:-out/gpu} python=${PYTHON:-python}
mkdir -p "$out"
export PYTHONPATH=tests:.${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
status=0

part() { # part NAME SECONDS COMMAND...: runs it, its output in NAME.txt, its result in summary.txt
  local name=$1 seconds=$2 start=$SECONDS code
  shift 2
  timeout --kill-after=10 "$seconds" "$@" >"$out/$name.txt" 2>&1
  code=$?
  [ "$code" -eq 0 ] || status=1
  printf '%-12s exit %3d  %4d s  %s\n' "$name" "$code" $((SECONDS - start)) \
    "$(tail -n 1 "$out/$name.txt" | cut -c1-120)" | tee -a "$out/summary.txt"
}

skipped() {
  printf '%-12s not run: %s\n' "$1" "$2" | tee -a "$out/summary.txt"
  status=1
}

conformance() { # One tiny kernel for each PTX wrapper: what the emulators must agree with.
  nvcc -std=c++20 -arch=native -Icsrc -Itests/cuda/conformance tests/cuda/conformance/record.cu \
    -o "$out/record" || return
  mkdir -p "$out/golden"
  "$out/record" "$out/golden" || return
  local recorded=tests/cuda/conformance/golden
  if [ ! -d "$recorded" ]; then
    echo "first recording: copy $out/golden to $recorded"
  else
    diff -r "$recorded" "$out/golden" && echo "as recorded"
  fi
}

about() {
  nvidia-smi || true
  nvcc --version || true
  "$python" -m attention_ext
}

: >"$out/summary.txt"
export -f about conformance
part report 30 bash -c about
reason=$("$python" -c 'import test_cuda_device; print(test_cuda_device.why_not())')
if [ -n "$reason" ]; then
  echo "nothing to check: $reason" | tee -a "$out/summary.txt"
  exit 2
fi
if command -v nvcc >/dev/null; then
  part conformance 60 bash -c conformance
else
  skipped conformance "no nvcc"
fi
part device 140 "$python" -m pytest -q -p no:cacheprovider -m "not slow" tests/test_cuda_device.py
if command -v compute-sanitizer >/dev/null; then
  # Torch's own kernels are not ours to judge.
  only=()
  if compute-sanitizer --help | grep -q -- --kernel-regex; then
    only=(--kernel-regex kns=attention_ext)
  fi
  for tool in memcheck racecheck; do
    # Without torch's cache every tensor is an allocation of its own, and a step past its end is seen.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 part "$tool" 70 compute-sanitizer --tool "$tool" \
      --error-exitcode 9 "${only[@]}" "$python" -m benchmarks.gpu_check small
  done
else
  skipped memcheck "no compute-sanitizer"
  skipped racecheck "no compute-sanitizer"
fi
part speed 95 "$python" -m benchmarks.gpu_check speed --out "$out" --seconds 80
echo "results: $out"
exit "$status"
