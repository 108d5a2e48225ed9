#!/bin/sh
# Does it serve?  deploy/verify.sh URL [MODEL]
#
# URL is a gateway or a vLLM server, for example http://127.0.0.1:8000; MODEL is the first that it lists unless given. Sends one
# chat request whole and one as a stream, with curl and nothing else, and looks at what comes back. Where a key is needed it
# is taken from the environment variable WARMLANE_KEY; it goes to curl through a pipe, since arguments can be seen.
#
# Exit codes: 0 it serves; 1 it does not, and the last line says what came instead; 2 wrong usage.
set -eu

SECONDS_EACH=${VERIFY_SECONDS:-300}

wrong_usage() {
    echo "usage: deploy/verify.sh URL [MODEL]   (for example http://127.0.0.1:8000)" >&2
    exit 2
}

[ $# -eq 1 ] || [ $# -eq 2 ] || wrong_usage
case $1 in http://?* | https://?*) URL=${1%/} ;; *) wrong_usage ;; esac
URL=${URL%/v1}
MODEL=${2-}
command -v curl >/dev/null || { echo "verify.sh: curl is not installed" >&2 && exit 2; }
FOLDER=$(mktemp -d)
ANSWER=$FOLDER/answer
trap 'rm -r "$FOLDER"' EXIT

failed() {
    printf 'failed  %s\n' "$1"
    printf 'verify.sh: %s\n' "$2" >&2
    exit 1
}

# ask TITLE PATH [CURL OPTION]...: the answer's body goes to $ANSWER; anything but 200 ends the script
ask() {
    title=$1 path=$2
    shift 2
    status=$(
        if [ -n "${WARMLANE_KEY-}" ]; then printf 'header = "Authorization: Bearer %s"\n' "$WARMLANE_KEY"; fi |
            curl --config - --silent --show-error --max-time "$SECONDS_EACH" --output "$ANSWER" \
                --write-out '%{http_code}' "$@" "$URL$path" 2>"$FOLDER/error"
    ) || status=none
    case $status in
        200) ;;
        none) failed "$title" "$URL$path: $(cat "$FOLDER/error")" ;;
        *) failed "$title" "$URL$path answered $status: $(head -c 500 "$ANSWER")" ;;
    esac
}

passed() { printf 'ok      %s\n' "$1"; }

# expect TITLE PATTERN WHAT: the answer has to match
expect() {
    grep -Eq "$2" "$ANSWER" || failed "$1" "$3; the answer begins: $(head -c 500 "$ANSWER")"
}

body() {
    printf '{"model": "%s", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64%s}' "$MODEL" "$1"
}

ask 'it lives' /health
passed 'it lives'

ask 'it lists models' /v1/models
# The first id in the list: vLLM's own list has others inside the entry of a model.
[ -n "$MODEL" ] || MODEL=$(grep -Eo '"id" *: *"[^"]*"' "$ANSWER" | head -n 1 | cut -d '"' -f 4)
[ -n "$MODEL" ] || failed 'it lists models' "the list is empty: $(head -c 500 "$ANSWER")"
passed "it lists models; asked is $MODEL"

CHAT=/v1/chat/completions
JSON='Content-Type: application/json'
ask 'it answers' $CHAT --header "$JSON" --data "$(body '')"
expect 'it answers' '"object" *: *"chat\.completion"' 'not a chat completion'
# A model that reasons may spend all its tokens on that.
expect 'it answers' '"(content|reasoning|reasoning_content)" *: *"[^"]' 'there is no text in it'
expect 'it answers' '"completion_tokens" *: *[1-9]' 'no token was generated'
passed 'it answers'

ask 'it streams' $CHAT --no-buffer --header "$JSON" --data "$(body ', "stream": true')"
expect 'it streams' '^data: .*"chat\.completion\.chunk"' 'not a stream of chunks'
expect 'it streams' '^data: \[DONE\]' 'the stream has no end'
passed 'it streams'
