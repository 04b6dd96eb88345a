#!/bin/sh
# Debian packages that some tests need: a browser, a systemd host in a folder with sshd, downloads in pieces, a sandbox.
# Where they cannot be installed those tests are skipped, and say so.
packages="aria2 bubblewrap chromium debootstrap iproute2 openssh-client systemd-container"

missing=
for package in $packages; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
say() { printf '%s\n' "[test tools] $*" >&2; }
if ! command -v apt-get >/dev/null 2>&1; then
    say "no apt-get: tests that need$missing are skipped"
elif [ "$(id -u)" -ne 0 ]; then
    say "not root: tests that need$missing are skipped; 'sudo sh scripts/setup_test_tools.sh' installs them"
elif ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing; } >&2; then
    say "could not install$missing: tests that need them are skipped"
fi
exit 0
