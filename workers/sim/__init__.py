"""An embedded replica: `workers.engine_model` behind vLLM's HTTP surface, so that a fleet runs without GPUs.

`settings` what one is; `service` engine and timers; `tokenizer`, `templates` and `answers` what a model would do;
`exchange` one HTTP request and its answer; `errors` vLLM's error bodies; `fields` and `sampling` what a body may say;
then one module for each group of routes. `workers.sim_replica` puts them together.
"""
