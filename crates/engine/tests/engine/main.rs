//! Tests of the engine over its public interface. They are one program: what they share is compiled and linked once. `allocation` is one of its own, since it counts what
//! a process allocates, and `templates_apart`, which is a process that others start.

mod agent;
mod answers;
mod budget;
mod chat_templates;
mod constraints;
mod conversation;
mod crowd;
mod demo;
mod drafts;
mod embeddings;
mod exactness;
mod faults;
mod gguf;
mod gguf_tokenizer;
mod golden;
mod harmony;
mod json_schema_suite;
mod mtp;
mod nodes;
mod numerics;
mod processors;
mod prompt_cache;
mod quantized;
mod real_models;
mod sources;
mod spill;
mod stages;
mod streaming;
mod support;
mod tables;
mod tokenizer;
mod toy_architecture;
