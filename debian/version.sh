#!/bin/sh
# Prints the package's version: that of pyrunc/__init__.py, which is the next release's; below it
# (~) with commit's time and hash where HEAD is not tagged as that release; then the Debian that it
# is built on, so that an upgrade of that is one of the package.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' pyrunc/__init__.py)
if commit=$(git describe --tags --exact-match --match "v$version" HEAD 2>/dev/null); then
	:
elif commit=$(TZ=UTC git log -1 --date=format-local:%Y%m%d%H%M%S \
	--format='%cd.%h' 2>/dev/null); then
	version="$version~git$commit"
fi
. /etc/os-release
echo "$version-1~debian$VERSION_ID"
