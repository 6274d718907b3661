#!/usr/bin/env bash
# The paper's experiments on NQ320k: main table, ablations, layers of the adapter, strength of the regularisation.
#
#   runs/nq320k.sh SRC OUT                                    everything, on 8 GPUs; docs/reproduce.md says what it costs
#   ROWS="base no-pawa" BASELINES= runs/nq320k.sh SRC OUT     some rows only, no other methods
#   GPUS=1 BATCH=128 ROWS=small runs/nq320k.sh SRC OUT        on one large GPU
#   QUICK=1 runs/nq320k.sh SRC OUT                            every step, tiny: to see that it runs
#
# SRC holds the files of Natural Questions as they are downloaded. OUT gets the data, the generated queries, the indexes, a
# JSON file per row and table.md, with the paper's figures beside the measured ones. The same command takes up a killed run.
# What can be chosen (GPUS, SIZE, SEEDS, BATCH, GENERATOR, FLAGS, ...) stands at the top of runs/paper.sh.
set -euo pipefail

KIND=${KIND:-nq320k} # or ddro, nci-tsv: forms that others have prepared
METRICS=R@1,R@10,R@100,RR@100
MORE_METRICS=

# The paper's tables 1 (main), 3 (ablations), 4 (layers; 4 is base, 0 is no-pawa) and 6 (alpha; 0.15 is base, 0 is
# no-regularisation). ft- is "w/ qg-ft".
EXPECTED='
base               65.86 85.20 92.42 73.12
large              66.23 85.27 92.49 73.37
ensemble           70.46 89.35 94.75 77.82
ft-base            68.91 88.48 94.48 76.17
ft-large           68.65 88.45 94.53 76.10
ft-ensemble        72.78 91.76 96.22 80.12
no-generated       60.23 80.20 90.92 67.89
no-documents       62.49 81.21 88.85 69.41
no-pawa            63.36 83.06 91.47 70.56
no-semantic        62.75 83.88 91.01 70.43
no-regularisation  65.07 82.91 90.65 71.80
unconstrained      65.65 84.89 92.23 72.79
layers-1           64.85 84.71 91.49 71.42
layers-2           65.40 85.12 92.82 72.83
layers-6           65.07 83.91 91.65 71.80
layers-8           63.60 83.11 91.78 71.22
alpha-0.1          65.51 85.28 92.52 72.76
alpha-0.2          65.55 84.48 92.61 72.63
alpha-0.3          65.44 85.21 92.45 72.83
'
# DSI and SEAL: their base models. DSI is cited there from its own paper, without the last two columns.
EXPECTED_BASELINES='
dsi                27.40 56.60 - -
seal               56.98 79.97 91.39 65.48
ance               51.33 80.33 91.78 61.71
ance-maxp          52.63 80.38 91.31 62.84
bert-bruteforce    28.65 53.42 73.16 36.60
bert-faiss         27.92 53.63 73.01 37.08
bm25+qg            35.43 61.83 76.92 44.47
bm25-okapi         15.11 32.48 50.54 21.07
'

# shellcheck source=runs/paper.sh
source "$(dirname "${BASH_SOURCE[0]}")/paper.sh"
main "$@"
