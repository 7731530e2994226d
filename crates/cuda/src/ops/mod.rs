//! Operations of a step, one file for each family. All of them take a [`context::Context`] and scratch of their own, and only enqueue.

pub mod activations;
pub mod attention;
pub mod context;
pub mod delta_net;
pub mod elementwise;
pub mod gemm;
pub mod gemv;
pub mod gemv_fused;
pub mod grouped_gemm;
pub mod index;
pub mod int11;
pub mod int11_floats;
pub mod latent;
pub mod latent_rows;
pub mod logits;
pub mod matmul;
pub mod mlp;
pub mod ngrams;
pub mod product;
pub mod recurrent;
pub mod rotary;
pub mod sampling;
pub mod state_space;
pub mod step;
pub mod streams;
pub mod tables;
