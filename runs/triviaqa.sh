#!/usr/bin/env bash
# The paper's experiments on TriviaQA: main table, ablations, layers of the adapter, strength of the regularisation.
#
#   runs/triviaqa.sh SRC OUT                                  everything, on 8 GPUs; docs/reproduce.md says what it costs
#   ROWS="base no-pawa" BASELINES= runs/triviaqa.sh SRC OUT   some rows only, no other methods
#   QUICK=1 runs/triviaqa.sh SRC OUT                          every step, tiny: to see that it runs
#
# SRC holds the unpacked triviaqa-rc archive. OUT gets the data, the generated queries, the indexes, a JSON file per row and
# table.md, with the paper's figures beside the measured ones. The same command takes up a killed run. What can be chosen
# (GPUS, SIZE, SEEDS, BATCH, GENERATOR, FLAGS, ...) stands at the top of runs/paper.sh.
set -euo pipefail

KIND=${KIND:-triviaqa} # or nci-tsv, the form of the paper's authors
# A question has several pages, and the paper's Recall@N counts it as found when one of them is: ir-measures calls that
# Success@N. R@N is the share of the pages. The paper's R-precision is, in the authors' code, Success@1.
METRICS=Success@5,Success@20,Success@100,Rprec
MORE_METRICS=Success@1,R@5,R@20,R@100

# The paper's tables 2 (main), 3 (ablations), 4 (layers; 4 is base, 0 is no-pawa) and 6 (alpha; 0.15 is base, 0 is
# no-regularisation).
EXPECTED='
base               90.49 94.45 96.94 73.90
large              91.73 95.17 97.44 74.94
ensemble           94.60 96.89 98.20 80.84
no-generated       84.56 90.94 95.32 63.50
no-documents       85.34 91.10 94.66 67.48
no-pawa            88.75 93.56 96.18 71.81
no-semantic        88.91 93.07 95.80 72.57
no-regularisation  89.01 93.63 96.16 71.59
unconstrained      89.58 93.97 96.61 72.51
layers-1           89.16 93.90 96.58 70.77
layers-2           89.89 94.35 96.86 72.89
layers-6           89.76 94.31 96.76 73.32
layers-8           87.90 93.30 96.20 70.75
alpha-0.1          90.14 94.15 96.96 72.78
alpha-0.2          90.44 94.41 96.97 73.22
alpha-0.3          90.02 94.09 96.79 73.53
'
# SEAL: its base model. Of the other rows of the paper's table most are cited there, not run.
EXPECTED_BASELINES='
seal               86.3 90.5 91.5 68.1
bm25+qg            59.71 72.06 82.71 39.66
bm25-okapi         56.91 69.45 80.24 37.29
'

# shellcheck source=runs/paper.sh
source "$(dirname "${BASH_SOURCE[0]}")/paper.sh"
main "$@"
