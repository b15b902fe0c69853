#!/bin/sh
# Gets the checkers that Python's packages do not have, as far as this machine allows:
# promtool into the folder given, without rights; cron's crontab and systemd's by installing them.
# Never fails: what is missing afterwards is skipped by the tests, by name.
folder=$1
mkdir -p "$folder/bin"

missing() { ! command -v "$1" >/dev/null 2>&1; }

if missing apt-get; then
    echo "get_tools: no apt-get here; only what is installed is used"
    exit 0
fi

if missing promtool && [ ! -x "$folder/bin/promtool" ]; then
    (cd "$folder" && { timeout 60 apt-get -qq download prometheus || {
        timeout 60 apt-get -qq update && timeout 60 apt-get -qq download prometheus
    }; } && dpkg-deb --extract prometheus_*.deb prometheus \
        && cp prometheus/usr/bin/promtool bin/ && rm -r prometheus prometheus_*.deb) 2>&1 | tail -n 3
fi

if [ "$(id -u)" = 0 ]; then
    # RUNLEVEL: invoke-rc.d then starts no daemon.
    for pair in crontab:cron systemd-analyze:systemd; do
        missing "${pair%%:*}" && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 timeout 60 \
            apt-get -qq install --yes --no-install-recommends "${pair##*:}" 2>&1 | tail -n 3
    done
fi
exit 0
