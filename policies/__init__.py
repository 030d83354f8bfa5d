"""Scheduling policies, one file each, and the predictors that inform them.

A file here is a policy, by whose name it goes, or what policies stand on.

Policies:

- `aged`: any order, in which who waits rises
- `atlas`: least service along the critical path of the program first (Autellix)
- `boosted`: any order, in which who has waited long goes first
- `continuum`: sessions keep their memory for a time while tools work
- `dfs_weight`: by a walk through the tree of cached prefixes (SGLang)
- `dynamic`: sealed batches that wait to fill up (Triton)
- `edf`: earliest deadline first
- `fair_batching`: a time for each step, which prompts share with decodes by slack
- `fastserve`: skip-join multi-level feedback queues
- `fcfs`: first come, first served
- `gittins`: by an index of how long answers have been so far
- `hrrn`: highest response ratio next
- `hygen`: offline requests in what online ones leave of a step
- `infercept`: sessions keep their memory where that wastes less than recomputing
- `lpm`: longest cached prefix first (SGLang)
- `ltr`: by a predicted order of output lengths
- `magnus`: sealed batches of similar predicted cost
- `mc_sf`: shortest first as far as future memory allows
- `multi_bin`: sealed batches of similar predicted length
- `nested_wait`: thresholds between segments of output length
- `orca`: whole prompts among decodes
- `past_future`: admission by future memory, from lengths of the past
- `plas`: least service of the program first (Autellix)
- `prefill_first`: prompts before decodes, in steps of their own
- `priority`: static priorities
- `program_fcfs`: first come, first served, by the session
- `program_srpt`: shortest remaining work of the session first
- `prompt_buckets`: sealed batches of prompts of similar length
- `qoserve`: chunks as large as the tightest decode allows
- `sarathi`: chunked prompts that stall no decode
- `scorpio`: guards of both targets, and credits to skip steps
- `shortest_prompt`: shortest prompt first
- `sjf`: shortest predicted output first
- `slai`: decodes as late as their deadlines allow
- `srtf`: shortest predicted remaining output first
- `static`: sealed batches to the end of their longest
- `tensorrt_llm`: admission by one of its capacity policies
- `tgi`: prompts interrupt decodes when enough of them wait
- `tgi3`: prompts join decodes, within a budget
- `trail`: shortest remaining output first, by refined predictions
- `vtc`: fair shares of service among tenants
- `wait`: batches of a type wait for enough arrivals

What all of them stand on:

- `knobs`: parameters by name, of policies, predictors and routers
- `policy`: what a policy is
- `registry`: policies by name

What several stand on:

- `attained_service`: service that requests have had (`plas`, `atlas`)
- `continuous_batching`: vLLM V1's loop with hooks, for policies that only order, hold or evict
- `deadlines`: when next tokens are due (`fair_batching`, `slai`)
- `future_memory`: memory until requests end (`mc_sf`, `tensorrt_llm`, `tgi`)
- `preemption`: making room at the expense of others
- `rank_loop`: the loop of `ranked` and `fastserve`
- `ranked`: preemption by a rank over all requests, for `srtf`, `ltr`, `trail` and their like
- `retaining`: memory kept while tools work (`infercept`, `continuum`)
- `serving_loop`: the loop of `continuous_batching`
- `shared_steps`: steps that served everybody, charged later (`plas`, `atlas`, `fastserve`)
- `step_load`: the time of a batch while it is formed (`fair_batching`, `hygen`)
- `wrapper`: policies that wrap another order (`aged`, `boosted`)

What one stands on:

- `credits`: who runs in the next step, of `scorpio`
- `feedback`: the queues of `fastserve`
- `fluid`: how many places the load of `wait` needs
- `last_moment`: the loop of `slai`
- `queued_batches`: the batches of `magnus` while they wait
- `segment_choice`: who runs and what they get, of `nested_wait`
- `segments`: the segments of `nested_wait`
- `slack_loop`: the loop of `fair_batching`
- `tenant_service`: what tokens charge the tenants of `vtc`
- `virtual_batch`: the guard of the time between tokens of `scorpio`
"""

from schedlab.policies.continuous_batching import ContinuousBatching
from schedlab.policies.policy import Policy
from schedlab.policies.registry import register

__all__ = ["ContinuousBatching", "Policy", "register"]
