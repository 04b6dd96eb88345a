"""DDTree inside a stock SGLang, by SGLang's own plugin route; no file of SGLang is changed.

SGLang finds `plugin.register` through the entry point group ``sglang.srt.plugins``. It adds the speculative algorithm
DDTREE: SGLang's DFLASH drafter proposes a block, `head.TreeHead` builds a best-first tree of it inside the draft's CUDA
graph, the target verifies the tree in SGLang's own verify graph, and `worker.DDTreeWorker` walks and commits.

`algorithm`, `worker` and `draft_input` stand on SGLang's classes; all else imports without SGLang.
"""
