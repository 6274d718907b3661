# shellcheck shell=bash
# The steps that nq320k.sh and triviaqa.sh share; it is sourced, not run.
#
#   SRC ─prepare─> OUT/data ─querygen─> OUT/generated.jsonl ─index─> OUT/index/ROW ─evaluate─> OUT/results/ROW.json
#
# A ROW is a line of one of the paper's tables; flags_of says how it differs from the paper's model. The script that sources
# this file has set KIND (what nci prepare makes), METRICS and MORE_METRICS (ir-measures names), and two texts, EXPECTED and
# EXPECTED_BASELINES: a row a line, its name and the paper's value of each of METRICS.
#
# A step is left out where its result lies already: a killed run is taken up again by the same command, and a result is
# made anew by removing it. Training itself loses a few minutes at most.

# ---- what can be chosen from outside

PYTHON=${PYTHON:-python}       # of the environment that nci is installed in
SIZE=${SIZE:-base}             # small, base or large: the model of the ensemble and of the ablations
FLAGS=${FLAGS:-}               # more flags of nci index, for every row
COMPARE_FLAGS=${COMPARE_FLAGS:-} # of nci compare, for the baselines, such as --dense.encoder NAME
ENCODER=${ENCODER:-}           # another encoder of the documents than the preset's bert-base-uncased, by name or folder
T5=${T5:-}                     # another encoder of the queries than the preset's t5-SIZE
if [[ -n ${QUICK:-} ]]; then   # everything once, tiny, on a laptop without a network: the figures mean nothing
  GPUS=${GPUS:-1} SEEDS=${SEEDS:-2} BATCH=${BATCH:-16} STEP=32 GENERATOR=${GENERATOR:-own}
  ENCODER=${ENCODER:-minilm} T5=${T5:-minilm} BASELINES=${BASELINES-bm25-okapi,bm25+qg}
  SAMPLING="--per-document 2 --max-source 32 --max-target 8"
  FLAGS="--embed.max_length 32 --tree.k 4 --tree.c 4 --tree.iterations 10 --pairs.spans 1 --pairs.terms 8 --pairs.max_length 16
    --model.encoder_layers 1 --model.d_model 32 --model.heads 2 --model.d_ff 64 --model.decoder_layers 1 --model.head_rank 4
    --train.epochs 1 --search.beam 20 $FLAGS"
else
  GPUS=${GPUS:-8}              # processes that train together, and parts of the corpus that queries are written for at once
  SEEDS=${SEEDS:-5}            # models of the ensemble, each with its own tree
  BATCH=${BATCH:-16}           # queries per GPU and pass; GPUS=1 BATCH=128 is the same step on one large GPU
  STEP=128                     # queries behind a step of the optimiser; gradients of several passes are added up for it
  GENERATOR=${GENERATOR:-castorini/doc2query-t5-base-msmarco} # a Hub name, a folder, or own: trained here from the encoder
  SAMPLING="--per-document 15 --max-source 512 --max-target 64 --top-k 50"
fi

# ---- small things

say() { printf '\n== %s\n' "$*" >&2; }

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 2
}

nci() { "$PYTHON" -m nci "$@"; }

names() { awk 'NF { print $1 }' <<<"$1"; } # the first column of a table

# A GPU for each part of the work, where there are GPUs.
device() { if command -v nvidia-smi >/dev/null; then echo "cuda${1:+:$1}"; else echo cpu; fi; }

start() { # SRC OUT
  [[ $# == 2 && -d $1 ]] || die "give the folder of the downloaded files and a folder for the results: ${0##*/} SRC OUT"
  SRC=$1 OUT=$2 DATA=$2/data
  ROWS=${ROWS-$(names "$EXPECTED")}
  BASELINES=${BASELINES-$(names "$EXPECTED_BASELINES" | paste -sd,)}
  ((STEP % (BATCH * GPUS) == 0)) || die "BATCH * GPUS is $((BATCH * GPUS)), which does not divide $STEP"
  local row
  for row in $ROWS; do flags_of "$row" >/dev/null; done
  mkdir -p "$OUT/index" "$OUT/results"
}

# ---- the steps

prepare() {
  [[ -e $DATA/corpus.jsonl ]] && return
  say "data: $KIND"
  nci prepare "$KIND" "$SRC" -o "$DATA"
}

# A generator that is on the Hub with its weights in a pickle file only is written anew as safetensors; nci opens no pickle.
fetch_generator() {
  [[ $GENERATOR == own || -d $GENERATOR ]] && return
  local folder=$OUT/generator
  if [[ ! -d $folder ]]; then
    say "generator: $GENERATOR"
    "$PYTHON" - "$GENERATOR" "$folder.part" <<'END'
import sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

name, folder = sys.argv[1:]
AutoTokenizer.from_pretrained(name).save_pretrained(folder)
AutoModelForSeq2SeqLM.from_pretrained(name).save_pretrained(folder)
END
    mv "$folder.part" "$folder"
  fi
  GENERATOR=$folder
}

# Queries for every document, unfiltered as in the paper. Every document has its own random numbers, so that parts of the
# corpus can be given to several GPUs and the queries are those of one.
generate() {
  local file=$OUT/generated.jsonl work=$OUT/generated part process processes=() parts=("$OUT/generated/part-0/queries.jsonl")
  [[ -e $file ]] && return
  fetch_generator
  say "queries: by $GENERATOR"
  mkdir -p "$work"
  # shellcheck disable=SC2086  # SAMPLING is several words
  if [[ $GENERATOR == own ]]; then
    nci querygen "$DATA" -o "$work/part-0" ${ENCODER:+--encoder "$ENCODER"} $SAMPLING --filter none
  else
    split -n "l/$GPUS" -d -a 2 --additional-suffix .jsonl "$DATA/corpus.jsonl" "$work/corpus-"
    parts=()
    trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # they would outlive this script
    for part in $(seq 0 $((GPUS - 1))); do
      "$PYTHON" -m nci querygen "$(printf '%s/corpus-%02d.jsonl' "$work" "$part")" -o "$work/part-$part" \
        --generator "$GENERATOR" $SAMPLING --filter none --device "$(device "$part")" &>"$work/part-$part.log" &
      processes+=($!) parts+=("$work/part-$part/queries.jsonl")
    done
    for process in "${processes[@]}"; do wait "$process" || die "no queries were written; $work/part-*.log say why"; done
    trap - EXIT
  fi
  cat "${parts[@]}" >"$file.part"
  mv "$file.part" "$file"
}

# The paper's qg-ft: the generator is first trained further on this data set's own (document, query) pairs.
generate_fine_tuned() {
  local file=$OUT/generated-ft.jsonl work=$OUT/generated-ft
  [[ -e $file ]] && return
  [[ $GENERATOR != own ]] || die "ft- rows fine-tune a generator: name one in GENERATOR"
  fetch_generator
  say "queries: by $GENERATOR, fine-tuned"
  # shellcheck disable=SC2086
  nci querygen "$DATA" -o "$work" --fine-tune "$GENERATOR" $SAMPLING --filter none
  mv "$work/queries.jsonl" "$file"
}

# How a row differs from the paper's model, as flags of `nci index`.
flags_of() { # ROW
  case ${1#ft-} in
    small | base | large | ensemble | unconstrained) ;;
    no-generated) echo --pairs.generated 0 ;;
    no-documents) echo --pairs.span_share 0 ;;
    no-pawa) echo --model.head tied --model.adapter_layers 0 ;;
    no-semantic) echo --tree.ids random ;;
    no-regularisation) echo --train.alpha 0 ;;
    layers-[1-8]) echo --model.adapter_layers "${1#*layers-}" ;;
    alpha-0.[0-9]*) echo --train.alpha "${1#*alpha-}" ;;
    *) die "there is no row $1; there are: $(names "$EXPECTED" | paste -sd' ')" ;;
  esac
}

# What the first index has read, embedded and clustered is linked into the others, which then need neither time nor disk
# for it. The stages' names say what they depend on: one that does not fit is made anew.
share_stages() { # INDEX
  local marker stage
  mkdir -p "$1/build"
  for marker in "$OUT/index"/{"$SIZE","ft-$SIZE"}/build/*/DONE; do
    stage=$(basename "$(dirname "$marker")")
    [[ -e $marker && ! -e $1/build/$stage ]] || continue
    rm -rf "$1/build/.link"
    cp -al "$(dirname "$marker")" "$1/build/.link"
    mv "$1/build/.link" "$1/build/$stage"
  done
}

build_index() { # NAME SIZE QUERIES FLAGS...
  local index=$OUT/index/$1 size=$2 queries=$3 launch=("$PYTHON" -m nci)
  shift 3
  [[ -e $index/CURRENT ]] && return
  say "index: $index"
  share_stages "$index"
  ((GPUS > 1)) && launch=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$GPUS" -m nci)
  # shellcheck disable=SC2086
  "${launch[@]}" index "$DATA" -o "$index" --preset "paper-$size" --generated "$queries" \
    --train.batch_size "$BATCH" --train.accumulation $((STEP / BATCH / GPUS)) \
    ${ENCODER:+--embed.encoder "$ENCODER"} ${T5:+--model.encoder "$T5"} $FLAGS "$@"
}

evaluate() { # ROW INDEX... [-- FLAGS...]
  local result=$OUT/results/$1.json indexes=()
  shift
  while [[ $# -gt 0 && $1 != -- ]]; do
    indexes+=("$OUT/index/$1")
    shift
  done
  nci evaluate "${indexes[@]}" "$DATA" --split test --metrics "$METRICS${MORE_METRICS:+,$MORE_METRICS}" -k 100 \
    --device "$(device)" --json "$result.part" "${@:2}"
  mv "$result.part" "$result"
}

run_row() { # ROW
  local row=$1 queries=$OUT/generated.jsonl first=$SIZE seed flags=() members=()
  [[ -e $OUT/results/$row.json ]] && return
  say "row: $row"
  if [[ $row == ft-* ]]; then
    generate_fine_tuned
    queries=$OUT/generated-ft.jsonl first=ft-$SIZE
  else
    generate
  fi
  case ${row#ft-} in
    small | base | large)
      build_index "$row" "${row#ft-}" "$queries"
      evaluate "$row" "$row"
      ;;
    ensemble)
      for seed in $(seq 0 $((SEEDS - 1))); do
        members+=("$first$( ((seed == 0)) || echo "-seed$seed")")
        build_index "${members[-1]}" "$SIZE" "$queries" --tree.seed "$seed" --pairs.seed "$seed" --train.seed "$seed"
      done
      evaluate "$row" "${members[@]}" -- --merge paper
      ;;
    unconstrained)
      build_index "$first" "$SIZE" "$queries"
      evaluate "$row" "$first" -- --unconstrained
      ;;
    *)
      read -ra flags <<<"$(flags_of "$row")"
      build_index "$row" "$SIZE" "$queries" "${flags[@]}"
      evaluate "$row" "$row"
      ;;
  esac
}

# The other methods of the paper's table; the encoder of the trained ones is that of the preset.
# shellcheck disable=SC2086  # FLAGS are several words
run_baselines() {
  local result=$OUT/results/baselines.json
  [[ -e $result ]] && return
  say "baselines: $BASELINES"
  nci index "$DATA" -o "$OUT/index/none" --preset "paper-$SIZE" ${ENCODER:+--embed.encoder "$ENCODER"} \
    ${T5:+--model.encoder "$T5"} $FLAGS --print-config >"$OUT/settings.yaml"
  nci compare "$DATA" --systems "$BASELINES" --split test --preset "$OUT/settings.yaml" -o "$OUT/compare" \
    --generated "$OUT/generated.jsonl" --metrics "$METRICS${MORE_METRICS:+,$MORE_METRICS}" --json "$result.part" $COMPARE_FLAGS
  mv "$result.part" "$result"
}

# All results so far, the paper's beside them, as a table that is also left in OUT/table.md.
report() {
  say "measured, and the paper's in brackets (%)"
  "$PYTHON" - "$OUT" "$METRICS${MORE_METRICS:+,$MORE_METRICS}" "$EXPECTED" "$EXPECTED_BASELINES" <<'END'
import json
import sys
from pathlib import Path

folder, metrics, rows, baselines = Path(sys.argv[1]), sys.argv[2].split(","), *sys.argv[3:]
paper = {words[0]: words[1:] for line in (rows + baselines).split("\n") if (words := line.split())}
measured = {}
for path in sorted((folder / "results").glob("*.json")):
    result = json.loads(path.read_text())
    measured.update(result["systems"] if path.stem == "baselines" else {path.stem: result["metrics"]})
lines = [f"| row | {' | '.join(metrics)} |", "|---" * (len(metrics) + 1) + "|"]
for row in [*paper, *sorted(set(measured) - set(paper))]:
    known = paper.get(row, [])
    cells = [f"{100 * measured[row][name]:.2f}" if row in measured else "-" for name in metrics]
    beside = [f" ({known[place]})" if place < len(known) else "" for place in range(len(metrics))]
    lines.append(f"| {row} | " + " | ".join(map("".join, zip(cells, beside))) + " |")
(folder / "table.md").write_text("\n".join(lines) + "\n")
print("\n".join(lines))
END
}

main() { # SRC OUT
  local row
  start "$@"
  prepare
  for row in $ROWS; do run_row "$row"; done
  if [[ -n $BASELINES ]]; then
    generate
    run_baselines || say "the baselines were not made: see above; BASELINES=bm25-okapi,bm25+qg names those to make"
  fi
  report
}
