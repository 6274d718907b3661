#!/usr/bin/env bash
# What each part is worth: the paper's ablations and ours, on BEIR folders below DATA_ROOT.
#
#   runs/ablations.sh DATA_ROOT OUT                                        all rows, of boolq and tldr
#   DATASETS=tldr ROWS="base no-pawa" runs/ablations.sh DATA_ROOT OUT      some
#   BESIDE=1 EPOCHS=12 runs/ablations.sh DATA_ROOT OUT                     all data sets at once on one GPU, short trainings
#   QUICK=1 runs/ablations.sh DATA_ROOT OUT                                few rows, one seed, the preset fast
#
# OUT/results.jsonl gets a line for every finished row, OUT/effects.md what each part is worth beside what the paper says,
# OUT/NAME the tables of its calls of `nci compare` (main, paper, ours) and all that was built. The same command takes up a killed run.
# The paper's rows change the paper's model, nci-pure, which has no anchors and trains on generated queries. Ours change the index.
set -euo pipefail

PYTHON=${PYTHON:-python}
DATASETS=${DATASETS:-boolq tldr}
if [[ -n ${QUICK:-} ]]; then
  SEEDS=${SEEDS:-1} JOBS=${JOBS:-1} PRESET=${PRESET:-fast} GENERATED=${GENERATED:-none}
  MAIN=${MAIN:-nci nci-zeroed} ROWS=${ROWS:-base no-pawa no-semantic}
else
  SEEDS=${SEEDS:-3}            # indexes behind each of the main rows; the others have one
  JOBS=${JOBS:-4}              # systems made at once
  PRESET=${PRESET:-light}      # settings of the indexes, or a .yaml file; default has a large encoder
  GENERATED=${GENERATED:-auto} # a file of generated queries; auto makes them, none means none
  MAIN=${MAIN:-nci nci-zeroed nci-pure}
  ROWS=${ROWS:-base no-generated no-documents no-pawa no-semantic no-regularisation constrained unconstrained
    layers-0 layers-1 layers-2 layers-4 layers-6 layers-8 alpha-0 alpha-0.1 alpha-0.15 alpha-0.2 alpha-0.3
    nci-generated nci-no-documents no-lexical no-lexical-queries no-rarity no-pieces no-tuning no-calibration}
fi
EPOCHS=${EPOCHS:-} # of the paper's rows; none: as many as the base has
read -ra flags <<<"${COMPARE_FLAGS:-}" # more of `nci compare`, on one line: COMPARE_FLAGS="--bm25.runs true"

die() { # STATUS WORDS...
  printf '%s: %s\n' "${0##*/}" "${*:2}" >&2
  exit "$1"
}

# A row as `nci compare` reads it. Rows have the names that they have in nq320k.sh. Only a model that was trained to know more
# than the tree can be searched without it.
system_of() { # ROW
  local free=model.normalise=position,model.anchor=none,model.content=false,model.edge_bias=false
  local epochs=${EPOCHS:+train.epochs=$EPOCHS}
  local more=${epochs:+,$epochs}
  case $1 in
    base) echo "$1=nci-pure${epochs:+[$epochs]}" ;;
    no-generated) echo "$1=nci-pure[pairs.generated=0$more]" ;;
    no-documents) echo "$1=nci-pure[pairs.span_share=0$more]" ;;
    no-pawa | layers-0) echo "$1=nci-pure[model.head=tied,model.adapter_layers=0$more]" ;;
    no-semantic) echo "$1=nci-pure[tree.ids=random$more]" ;;
    no-regularisation) echo "$1=nci-pure[train.alpha=0$more]" ;;
    constrained) echo "$1=nci-pure[$free$more]" ;;
    unconstrained) echo "$1=nci-pure-unconstrained[$free$more]" ;;
    layers-[1-8]) echo "$1=nci-pure[model.adapter_layers=${1#*-}$more]" ;;
    alpha-0 | alpha-0.[0-9]*) echo "$1=nci-pure[train.alpha=${1#*-}$more]" ;;
    nci-generated) echo "$1=nci-qg" ;;
    nci-no-documents) echo "$1=nci[pairs.span_share=0]" ;;
    no-lexical) echo "$1=nci[model.score=dense]" ;;
    no-lexical-queries) echo "$1=nci[lexical.training=false]" ;;
    no-rarity) echo "$1=nci[lexical.rarity=0]" ;;
    no-pieces) echo "$1=nci[embed.pieces=0]" ;;
    no-tuning) echo "$1=nci[tune.epochs=0,tune.refreshes=0]" ;;
    no-calibration) echo "$1=nci[calibrate.share=0]" ;;
    *) die 2 "there is no row $1; runs/ablations.sh lists them" ;;
  esac
}

compare() { # NAME TABLE SYSTEMS FLAGS...
  local name=$1 table=$2 systems=$3 splits=test
  shift 3
  [[ -e $root/$name/qrels/test-unseen.tsv ]] && splits=test,test-unseen
  [[ $splits == test || $table != main ]] || set -- "$@" --tradeoff "$out/$name/tradeoff.png"
  printf '\n== %s: %s\n' "$name" "$table" >&2
  "$PYTHON" -m nci compare "$root/$name" --systems "$systems" --split "$splits" --seeds "$SEEDS" --jobs "$JOBS" \
    --preset "$PRESET" --generated "$GENERATED" -o "$out/$name" --json "$out/$name/$table.json" \
    --append "$out/results.jsonl" "${flags[@]}" "$@" >"$out/$name/$table.tmp" || {
    rm -f "$out/$name/$table.tmp"
    return 1
  }
  mv "$out/$name/$table.tmp" "$out/$name/$table.txt"
  cat "$out/$name/$table.txt"
}

# What each part is worth in R@1: what has it, less what has not; the paper's from its table for NQ320k.
report() {
  local expected
  expected=$(sed -n "/^EXPECTED='/,/^'/p" "$(dirname "${BASH_SOURCE[0]}")/nq320k.sh")
  "$PYTHON" - "$out" "$expected" <<'END'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
paper = {words[0]: float(words[1]) for line in sys.argv[2].split("\n") if len(words := line.split()) == 5}
systems = {}  # (data, row) -> the system that it stood for in the last calls: EPOCHS may have been another before
for file in sorted(folder.glob("*/*.json"), key=lambda file: file.stat().st_mtime):
    found = json.loads(file.read_text(encoding="utf-8"))
    systems |= {(found["data"], row): system for row, system in found["rows"].items()}
here = {}  # (data, split) -> row -> R@1; the last line of a row counts
for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
    found = json.loads(line)
    if systems.get((found["data"], found["row"])) == found["system"]:
        here.setdefault((found["data"], found["split"]), {})[found["row"]] = 100 * found["metrics"]["R@1"]
# part: with and without it here, with and without it in the paper
parts = {
    "generated queries": ("base", "no-generated", "base", "no-generated"),
    "documents as queries": ("base", "no-documents", "base", "no-documents"),
    "prefix-aware weights": ("base", "no-pawa", "base", "no-pawa"),
    "semantic ids": ("base", "no-semantic", "base", "no-semantic"),
    "regularisation": ("alpha-0.15", "no-regularisation", "base", "no-regularisation"),
    "constrained beam search": ("constrained", "unconstrained", "base", "unconstrained"),
    **{f"4 adapter layers, not {n}": ("layers-4", f"layers-{n}", "base", f"layers-{n}" if n else "no-pawa") for n in (0, 1, 2, 6, 8)},
    **{f"alpha 0.15, not {a}": ("alpha-0.15", f"alpha-{a}", "base", f"alpha-{a}") for a in (0.1, 0.2, 0.3)},
    "our generative part": ("nci", "nci-zeroed", "", ""),
    "our generated queries": ("nci-generated", "nci", "", ""),
    "our documents as queries": ("nci", "nci-no-documents", "", ""),
    "anchors": ("nci", "nci-pure", "", ""),
    "lexical score": ("nci", "no-lexical", "", ""),
    "queries in the lexical score": ("nci", "no-lexical-queries", "", ""),
    "rarity among queries in the lexical score": ("nci", "no-rarity", "", ""),
    "late interaction": ("nci", "no-pieces", "", ""),
    "tuning of the encoder": ("nci", "no-tuning", "", ""),
    "calibration": ("nci", "no-calibration", "", ""),
}
places = [" ".join(place) for place in here]
lines = [f"| R@1 by which a part helps | paper, NQ320k | {' | '.join(places)} | other direction than the paper |", "|---" * (len(places) + 3) + "|"]
for part, (with_it, without, base, ablated) in parts.items():
    said = paper[base] - paper[ablated] if base else None
    gains = [rows[with_it] - rows[without] if {with_it, without} <= rows.keys() else None for rows in here.values()]
    if any(gain is not None for gain in gains):
        other = [place for place, gain in zip(places, gains) if said and gain and said * gain < 0]
        cells = ["-" if value is None else f"{value:+.2f}" for value in (said, *gains)]
        lines.append(f"| {part} | {' | '.join(cells)} | {', '.join(other) if said is not None else '-'} |")
lines.append("\nresults.jsonl says how many seeds a row has; with one, a difference of less than a point may be chance.")
(folder / "effects.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
print("\n" + "\n".join(lines))
END
}

[[ $# == 2 && -d $1 ]] || die 2 "give the folder of the data sets and a folder for the results: ${0##*/} DATA_ROOT OUT"
"$PYTHON" -c 'import nci, jsonargparse' 2>/dev/null ||
  die 1 "$PYTHON cannot import nci and jsonargparse; name one that can: PYTHON=venv/bin/python ${0##*/} DATA_ROOT OUT"
[[ -z $EPOCHS || $EPOCHS =~ ^[0-9]*\.?[0-9]+$ ]] || die 2 "EPOCHS is a number, not $EPOCHS"
root=$1 out=$2 failed=0 paper='' ours=''
for row in $ROWS; do
  system=$(system_of "$row")
  case $row in
    base) ;;
    nci-* | no-lexical* | no-rarity | no-pieces | no-tuning | no-calibration) ours+=,$system ;;
    *) paper+=,$system ;;
  esac
done
for name in $DATASETS; do
  [[ -e $root/$name/corpus.jsonl ]] || die 1 "there is no BEIR folder $root/$name: corpus.jsonl, queries.jsonl and qrels/test.tsv were expected"
done
# The first index of a call is what its p-values are against.
tables() { # NAME
  local failed=0
  mkdir -p "$out/$1"
  compare "$1" main "${MAIN// /,}" || failed=1
  [[ -z $ours ]] || compare "$1" ours "nci$ours" --variant-seeds 1 || failed=1
  [[ -z $paper && " $ROWS " != *" base "* ]] || compare "$1" paper "$(system_of base)$paper" --variant-seeds 1 || failed=1
  return "$failed"
}
# Processes beside each other share one GPU only inside NVIDIA's service, which this begins where it is installed.
if [[ -n ${BESIDE:-} && -z ${INSIDE:-} ]]; then
  export INSIDE=1
  exec "$PYTHON" -m nci.mps bash "$0" "$@"
fi
running=()
for name in $DATASETS; do
  if [[ -n ${BESIDE:-} ]]; then
    tables "$name" &
    running+=($!)
  else
    tables "$name" || failed=1
  fi
done
for each in "${running[@]}"; do wait "$each" || failed=1; done
[[ -e $out/results.jsonl ]] && report
((!failed)) || die 1 "not all rows were made: see above; ROWS names those to make"
