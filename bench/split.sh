#!/usr/bin/env bash
# The time of a layer with the link share that the controller chooses, beside every fixed share, for links of four speeds.
#
#     bench/split.sh STRATA MODEL [ROUNDS]
#
# MODEL has experts of real shape (bench/run.sh makes one). The sim device holds a part of them; one thread is the cpu lane, because the
# device and its copy engine need cores too. Shares take turns within a round; medians over the rounds of a run's mean layer.
set -u
strata=${1:?usage: bench/split.sh STRATA MODEL [ROUNDS]} model=${2:?usage: bench/split.sh STRATA MODEL [ROUNDS]} rounds=${3:-3}
shares="0 32 64 96 128 160 192 224 256 chosen"

layer_us() { # LINK SHARE
    local options=(--link-share "$2")
    [ "$2" != chosen ] || options=()
    "$strata" run -m "$model" -p "1 2 3 4" -n 200 --ignore-eos --temp 0 --threads 1 --swaps 0 --device sim --sim-vram 200M --sim-link "$1" "${options[@]}" \
        --stats=json -q 2>&1 >/dev/null | sed -nE 's/.*"all":\{"mean_us":([0-9.]+),"p95_us":[0-9.]+\}\},"layers".*/\1/p'
}

for link in 1G 6G 25G 55G; do
    for ((i = 0; i < rounds; i++)); do
        for share in $shares; do
            echo "$share $(layer_us $link "$share")"
        done
    done | sort -k1,1 -k2,2g | awk -v link=$link -v rounds="$rounds" '
        NF < 2 { bad = 1 }
        { n[$1]++; if (n[$1] == int((rounds + 1) / 2)) us[$1] = $2 }
        END {
            if (bad) { print "a run gave no figure"; exit 1 }
            for (s in us) if (s != "chosen" && (best == "" || us[s] < us[best])) best = s
            printf "link %4sB/s: share 0 %6.0f us, best fixed %3d/256 %6.0f us, chosen %6.0f us: %.2f of share 0, %.2f of the best\n",
                   link, us[0], best, us[best], us["chosen"], us["chosen"] / us[0], us["chosen"] / us[best]
        }' || exit 1
done
