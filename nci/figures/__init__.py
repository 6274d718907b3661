"""The paper's figures for any index: one small file each, whose `draw` takes a `Scene` and gives a `Drawing`.

scene       what figures are drawn from: indexes, queries, judgements, two groups of similar queries
style       how they look, and how they become PNG and SVG
command     `nci plot`, `nci efficiency`, `nci cited`
"""

FIGURES = ("curve", "prefixes", "tsne", "beam", "tree", "frequency")
"""Names of figures; each is the module that draws it."""
