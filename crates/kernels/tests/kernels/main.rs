//! Tests of kernels over the public interface. They are one program, and the kernels in it are those that the library has compiled. A unit test in `src` compiles the
//! kernels that it calls once more, so only what nobody else can see is tested there.

mod affine_golden;
mod blocks_golden;
mod delta;
mod guarded;
mod matmul;
#[path = "../../src/test_random.rs"]
mod random;
mod state_space;
