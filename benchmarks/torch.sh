#!/bin/sh
# Torch, to be timed beside us: installed where it comes without the libraries of a GPU, which are gigabytes, or in any case.
# usage: torch.sh PYTHON REQUIREMENT [IN_ANY_CASE]
python=$1 wanted=$2 anyway=$3
"$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)" && exit 0
if [ -z "$anyway" ]; then
  planned=$("$python" -m pip --disable-pip-version-check install --dry-run "$wanted" 2>/dev/null | grep "^Would install") || exit 0
  case $planned in
    *nvidia* | *cuda*)
      echo "torch would come with gigabytes for a GPU, so it is not timed beside us: make demo TORCH=1 gets it all the same"
      exit 0
      ;;
  esac
fi
echo "installing torch, to be timed beside us"
"$python" -m pip --disable-pip-version-check -qq install "$wanted" || echo "torch could not be installed: the demo does without"
