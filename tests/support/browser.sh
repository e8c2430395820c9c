#!/bin/sh
# Gets what the browser tests need, where that is possible: a Chromium, and axe-core. Says what is missing; never fails.
# sh tests/support/browser.sh PYTHON
python=$1
if ! "$python" -m tests.support.browser >/dev/null 2>&1; then
    echo "installing Chromium for the browser tests"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium) >/dev/null 2>&1
    fi
    "$python" -m tests.support.browser >/dev/null 2>&1 || timeout 300 "$python" -m playwright install chromium >/dev/null 2>&1
fi
"$python" -m tests.support.browser
if [ ! -f build/npm/node_modules/axe-core/axe.min.js ]; then
    echo "installing axe-core for the accessibility tests"
    npm install --silent --no-audit --no-fund --prefix build/npm axe-core@4 >/dev/null 2>&1 || echo "axe-core: npm could not install it"
fi
exit 0
