#!/usr/bin/env bash
# The full table of systems for every BEIR folder below DATA_ROOT: metrics, significance, latency and size of each.
#
#   runs/table.sh DATA_ROOT OUT              every system, the large encoder: more work than the next
#   PRESET=light runs/table.sh DATA_ROOT OUT the same with the small encoder, as docs/results.md has it
#   QUICK=1 runs/table.sh DATA_ROOT OUT      few systems, one seed, the preset fast: for two CPU cores
#   BESIDE=1 SYSTEMS=nci,nci-zeroed SEEDS=1 JOBS=1 runs/table.sh DATA_ROOT OUT
#                                            all data sets at once, beside each other on one GPU: the index alone, the soonest
#
# OUT/NAME gets table.txt, table.json, table.tex, table.png, tradeoff.png and all that was built, OUT/summary.md R@1 of all, also of the
# withheld queries, by which settings may be chosen: SYSTEMS="nci,longer=nci[train.epochs=12]". The same command takes up a killed run,
# and where everything is there it only prints. `nci compare --help` explains the systems. PYTHON names the interpreter that nci is
# installed for: PYTHON=venv/bin/python runs/table.sh DATA_ROOT OUT.
set -euo pipefail

PYTHON=${PYTHON:-python}
if [[ -n ${QUICK:-} ]]; then
  SYSTEMS=${SYSTEMS:-bm25,bm25-okapi,bm25+trainq,dense,knn,rrf:bm25+dense,nci,nci-zeroed,nci-untrained}
  SEEDS=${SEEDS:-1} JOBS=${JOBS:-1} PRESET=${PRESET:-fast}
else
  SYSTEMS=${SYSTEMS:-table}    # all that nci compare calls so
  SEEDS=${SEEDS:-3}            # indexes behind the rows of nci; its variants have one
  JOBS=${JOBS:-4}              # systems made at once
  PRESET=${PRESET:-default}    # settings of the indexes, or a .yaml file
fi

read -ra flags <<<"${COMPARE_FLAGS:-}" # more of `nci compare`, on one line: COMPARE_FLAGS="--bm25.runs true"

[[ $# == 2 && -d $1 ]] || {
  echo "${0##*/}: give the folder of the data sets and a folder for the results: ${0##*/} DATA_ROOT OUT" >&2
  exit 2
}
"$PYTHON" -c 'import nci, jsonargparse' 2>/dev/null || {
  echo "${0##*/}: $PYTHON cannot import nci and jsonargparse; name one that can: PYTHON=venv/bin/python ${0##*/} DATA_ROOT OUT" >&2
  exit 1
}
# R@1 of every system on every data set, the best mean of the splits in bold; then these means, with p-values that are
# corrected for the number of data sets (those of table.txt are for the number of systems).
summary() {
  "$PYTHON" - "$out" <<'END'
import json
import sys
from pathlib import Path

from nci.significance import holm

folder = Path(sys.argv[1])
tables = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*/table.json"))}
here = {}  # data -> row -> R@1 of every split
for name, found in tables.items():
    results = found["splits"].values()
    here[name] = {row: [100 * one["systems"][row]["R@1"] for one in results] for row in found["systems"]}
rows = list(dict.fromkeys(row for values in here.values() for row in values))
best = {name: max(round(sum(each), 6) for each in values.values()) for name, values in here.items()}
lines = [f"| R@1 | {' | '.join(here)} |", "|---" * (len(here) + 1) + "|"]
for row in rows:
    cells = []
    for name, values in here.items():
        cell = " / ".join(f"{value:.1f}" for value in values.get(row, [])) or "-"
        cells.append(f"**{cell}**" if row in values and round(sum(values[row]), 6) == best[name] else cell)
    lines.append(f"| `{row}` | {' | '.join(cells)} |")
means = {name: found["mean"] for name, found in tables.items() if "mean" in found}
if means:
    (reference, *others) = {found["reference"] for found in means.values()}
    against = f"against {reference}" if not others else "against the first index of the table"
    lines += ["", f"p: {against}, two-sided, Holm-corrected over the data sets.", ""]
    lines += [f"| mean of R@1 | {' | '.join(means)} |", "|---" * (len(means) + 1) + "|"]
    for row in rows:
        corrected = holm({name: found["tests"][row]["p_value"] for name, found in means.items() if row in found["tests"]})
        cells = []
        for name, found in means.items():
            spread = f" +- {100 * found['spread'][row]:.2f}" if row in found["spread"] else ""
            p = f", p {corrected[name]:.4f}" if name in corrected else ""
            cells.append(f"{100 * found['systems'][row]:.2f}{spread}{p}" if row in found["systems"] else "-")
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
withheld = {name: next(iter(found["splits"].values())).get("withheld", {}) for name, found in tables.items()}
if any(withheld.values()):
    lines += ["", "R@1 of the withheld queries that a system was fitted on: what settings are chosen by. In bold the best mean of all.", ""]
    lines += [f"| withheld | {' | '.join(withheld)} | mean |", "|---" * (len(withheld) + 2) + "|"]
    chosen = [row for row in rows if any(row in values for values in withheld.values())]
    everywhere = [row for row in chosen if all(row in values for values in withheld.values())]
    overall = {row: sum(values[row] for values in withheld.values()) / len(withheld) for row in everywhere}
    for row in chosen:
        cells = [f"{100 * values[row]:.2f}" if row in values else "-" for values in withheld.values()]
        mean = f"{100 * overall[row]:.2f}" if row in overall else "-"
        cells.append(f"**{mean}**" if row in overall and overall[row] == max(overall.values()) else mean)
        lines.append(f"| `{row}` | {' | '.join(cells)} |")
(folder / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
print("\n" + "\n".join(lines))
END
}

# One data set.
table() { # FOLDER
  local data=$1 name splits=test curve=()
  name=$(basename "$(realpath "$data")")
  [[ -e $data/qrels/test-unseen.tsv ]] && splits=test,test-unseen curve=(--tradeoff "$out/$name/tradeoff.png")
  printf '\n== %s\n' "$name" >&2
  mkdir -p "$out/$name"
  "$PYTHON" -m nci compare "$data" --systems "$SYSTEMS" --split "$splits" --seeds "$SEEDS" --variant-seeds 1 --jobs "$JOBS" --preset "$PRESET" \
    -o "$out/$name" --json "$out/$name/table.json" --latex "$out/$name/table.tex" --plot "$out/$name/table.png" "${curve[@]}" "${flags[@]}" >"$out/$name/table.tmp" || {
    rm -f "$out/$name/table.tmp"
    return 1
  }
  mv "$out/$name/table.tmp" "$out/$name/table.txt"
  cat "$out/$name/table.txt"
}

# Processes beside each other share one GPU only inside NVIDIA's service, which this begins where it is installed.
if [[ -n ${BESIDE:-} && -z ${INSIDE:-} ]]; then
  export INSIDE=1
  exec "$PYTHON" -m nci.mps bash "$0" "$@"
fi
root=$1 out=$2 found=0 failed=0 running=()
for data in "$root" "$root"/*; do
  [[ -e $data/corpus.jsonl && -e $data/qrels/test.tsv ]] || continue
  found=1
  if [[ -n ${BESIDE:-} ]]; then
    table "$data" &
    running+=($!)
  else
    table "$data" || exit 1
  fi
done
for each in "${running[@]}"; do wait "$each" || failed=1; done
((found)) || {
  echo "${0##*/}: there is no BEIR folder in $root: corpus.jsonl, queries.jsonl and qrels/test.tsv were expected" >&2
  exit 1
}
summary
((!failed))
