#!/usr/bin/env bash
# Makes `docker compose` work where the docker client lacks the plugin. This Debian release has no
# compose v2, so it is unpacked (not installed) from the next one. The mirror and its key are those
# of the machine's own sources, and apt's own state is left as it is.
set -euo pipefail
docker compose version 2>/dev/null && exit

suite=trixie
plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp"/{sources,lists/partial,cache/archives/partial,deb,root} "$plugins"

own=$(ls /etc/apt/sources.list.d/*.sources | head -1)
uri=$(awk '/^URIs:/ {print $2; exit}' "$own")
key=$(awk '/^Signed-By:/ {print $2; exit}' "$own")
printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' \
  "$uri" "$suite" "$key" > "$tmp/sources/next.sources"

apt=(apt-get -qq
  -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$tmp/sources"
  -o Dir::State::lists="$tmp/lists" -o Dir::Cache="$tmp/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$tmp/deb" && "${apt[@]}" download docker-compose)
dpkg-deb -x "$tmp"/deb/docker-compose_*.deb "$tmp/root"
install "$tmp/root/usr/libexec/docker/cli-plugins/docker-compose" "$plugins/"

docker compose version
