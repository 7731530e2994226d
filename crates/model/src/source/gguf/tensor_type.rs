//! The types of tensors: numbers, names and sizes of blocks, as ggml defines them.

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// Its number in files.
    pub id: u32,
    /// What people call it.
    pub name: &'static str,
    /// Elements of a block; rows are whole blocks.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
}

const fn kind(id: u32, name: &'static str, elements: usize, bytes: usize) -> TensorType {
    TensorType { id, name, elements, bytes }
}

/// Every type whose size is known, whether it can be computed with or not.
const TYPES: [TensorType; 34] = [
    kind(0, "F32", 1, 4),
    kind(1, "F16", 1, 2),
    kind(2, "Q4_0", 32, 18),
    kind(3, "Q4_1", 32, 20),
    kind(6, "Q5_0", 32, 22),
    kind(7, "Q5_1", 32, 24),
    kind(8, "Q8_0", 32, 34),
    kind(9, "Q8_1", 32, 36),
    kind(10, "Q2_K", 256, 84),
    kind(11, "Q3_K", 256, 110),
    kind(12, "Q4_K", 256, 144),
    kind(13, "Q5_K", 256, 176),
    kind(14, "Q6_K", 256, 210),
    kind(15, "Q8_K", 256, 292),
    kind(16, "IQ2_XXS", 256, 66),
    kind(17, "IQ2_XS", 256, 74),
    kind(18, "IQ3_XXS", 256, 98),
    kind(19, "IQ1_S", 256, 50),
    kind(20, "IQ4_NL", 32, 18),
    kind(21, "IQ3_S", 256, 110),
    kind(22, "IQ2_S", 256, 82),
    kind(23, "IQ4_XS", 256, 136),
    kind(24, "I8", 1, 1),
    kind(25, "I16", 1, 2),
    kind(26, "I32", 1, 4),
    kind(27, "I64", 1, 8),
    kind(28, "F64", 1, 8),
    kind(29, "IQ1_M", 256, 56),
    kind(30, "BF16", 1, 2),
    kind(34, "TQ1_0", 256, 54),
    kind(35, "TQ2_0", 256, 66),
    kind(39, "MXFP4", 32, 17),
    kind(40, "NVFP4", 64, 36),
    kind(41, "Q1_0", 128, 18),
];

impl TensorType {
    /// The type of that number; `None` where nothing is known of it.
    pub fn of(id: u32) -> Option<TensorType> {
        TYPES.into_iter().find(|kind| kind.id == id)
    }

    /// Bytes of a row of `elements`; `None` where they are not whole blocks, or too many.
    pub fn row_bytes(&self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.elements) {
            return None;
        }
        (elements / self.elements).checked_mul(self.bytes)
    }
}
