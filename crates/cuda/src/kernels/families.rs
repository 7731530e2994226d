//! All kernels: some are one of a kind, most are instances of a family over weight formats and tiles. Each has a dense number, by which a launch finds it.

use std::borrow::Cow;
use std::fmt;

use super::format::{
    BF16_FORMATS, BLOCK_FORMATS, BYTE_FORMATS, F32_FORMATS, INT8_FORMATS, INT11_BLOCK_FORMATS, INT11_FLOAT_FORMATS,
    INT11_FORMATS, INT11_TENSOR_FORMATS, KernelFormat,
};
use crate::parameters as p;

/// A kernel, by its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel(u16);

/// Kernels of one unit that do the same for several formats and tiles. Their names are `FAMILY_FORMATTILE`.
struct Instances {
    family: Family,
    unit: &'static str,
    formats: &'static [KernelFormat],
    tiles: &'static [&'static str],
    /// Bytes of the struct that they take.
    parameters: usize,
}

macro_rules! kernels {
    (
        singles {
            $($constant:ident $single:literal in $single_unit:literal takes $single_parameters:ident;)*
        }
        families {
            $($(#[$doc:meta])* $family:ident $name:literal {
                $(in $unit:literal of $formats:ident by $tiles:tt takes $parameters:ident;)*
            })*
        }
    ) => {
        /// A family of kernels over weight formats.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Family {
            $($(#[$doc])* $family,)*
        }

        const FAMILIES: &[(Family, &str)] = &[$((Family::$family, $name),)*];

        /// Name, unit, and bytes of the struct that it takes.
        const SINGLES: &[(&str, &str, usize)] = &[$(($single, $single_unit, size_of::<p::$single_parameters>()),)*];

        const INSTANCES: &[Instances] = &[$($(
            Instances {
                family: Family::$family,
                unit: $unit,
                formats: $formats,
                tiles: &$tiles,
                parameters: size_of::<p::$parameters>(),
            },
        )*)*];

        impl Kernel {
            $(pub const $constant: Kernel = Kernel::single($single);)*
        }
    };
}

kernels! {
    singles {
        QUANTIZE "quantize" in "elementwise/quantize" takes Quantize;
        ENCODE_INT11 "encode_int11" in "elementwise/int11" takes Quantize;
        INT11_RECORDS_BLOCKS "int11_records_blocks" in "gemm/int11_records" takes Records;
        INT11_RECORDS_AFFINE "int11_records_affine" in "gemm/int11_records" takes Records;
        INT11_ARRANGE "int11_arrange" in "gemm/int11_records" takes Arrange;
        GEMM_WIDE_16 "gemm_wide_16" in "gemm/int11_records_wide" takes Products;
        GEMM_WIDE_16_BIASED "gemm_wide_16_biased" in "gemm/int11_records_wide" takes Products;
        GEMM_WIDE_32 "gemm_wide_32" in "gemm/int11_records_wide" takes Products;
        GEMM_WIDE_32_BIASED "gemm_wide_32_biased" in "gemm/int11_records_wide" takes Products;
        GEMM_WIDE_32_SLICED "gemm_wide_32_sliced" in "gemm/int11_records_wide" takes Products;
        GEMM_WIDE_32_SLICED_BIASED "gemm_wide_32_sliced_biased" in "gemm/int11_records_wide" takes Products;
        GEMM_WIDE_64_BIASED "gemm_wide_64_biased" in "gemm/int11_records_wide" takes Products;
        GEMM_WIDE_64_SLICED_BIASED "gemm_wide_64_sliced_biased" in "gemm/int11_records_wide" takes Products;
        GEMM_WIDE_16_GROUPED "gemm_wide_16_grouped" in "gemm/int11_records_wide" takes ExpertProducts;
        GEMM_WIDE_16_BIASED_GROUPED "gemm_wide_16_biased_grouped" in "gemm/int11_records_wide" takes ExpertProducts;
        GEMM_WIDE_32_GROUPED "gemm_wide_32_grouped" in "gemm/int11_records_wide" takes ExpertProducts;
        GEMM_WIDE_32_BIASED_GROUPED "gemm_wide_32_biased_grouped" in "gemm/int11_records_wide" takes ExpertProducts;
        GEMM_WIDE_32_SLICED_GROUPED "gemm_wide_32_sliced_grouped" in "gemm/int11_records_wide" takes ExpertProducts;
        GEMM_WIDE_32_SLICED_BIASED_GROUPED "gemm_wide_32_sliced_biased_grouped" in "gemm/int11_records_wide" takes ExpertProducts;
        GEMM_WIDE_64_BIASED_GROUPED "gemm_wide_64_biased_grouped" in "gemm/int11_records_wide" takes ExpertProducts;
        GEMM_WIDE_64_SLICED_BIASED_GROUPED "gemm_wide_64_sliced_biased_grouped" in "gemm/int11_records_wide" takes ExpertProducts;
        EMBED "embed" in "elementwise/embed" takes Embed;
        REARRANGE "rearrange" in "elementwise/rearrange" takes Rearrange;
        RESTORE "restore" in "elementwise/rearrange" takes Rearrange;
        COPY_ROWS "copy_rows" in "elementwise/embed" takes CopyRows;
        BETWEEN_SCALE "between_scale" in "elementwise/between" takes Between;
        BETWEEN_GEGLU "between_geglu" in "elementwise/between" takes Between;
        BETWEEN_SWIGLU "between_swiglu" in "elementwise/between" takes Between;
        BETWEEN_CLAMPED_SWIGLU "between_clamped_swiglu" in "elementwise/between" takes Between;
        BETWEEN_SITU "between_situ" in "elementwise/between" takes Between;
        BETWEEN_SIGMOID_GATE "between_sigmoid_gate" in "elementwise/between" takes Between;
        BETWEEN_SQUARED_RELU "between_squared_relu" in "elementwise/between" takes Between;
        BETWEEN_ZERO "between_zero" in "elementwise/between" takes Between;
        BETWEEN_SOFT_CAP "between_soft_cap" in "elementwise/between" takes Between;
        BETWEEN_NORM "between_norm" in "elementwise/between" takes Between;
        BETWEEN_NORM_GROUPS "between_norm_groups" in "elementwise/between" takes Between;
        BETWEEN_DIVIDED_SILU "between_divided_silu" in "elementwise/between" takes Between;
        BETWEEN_SCALE_ROWS "between_scale_rows" in "elementwise/between" takes Between;
        BETWEEN_ADD_NORMED "between_add_normed" in "elementwise/between" takes Between;
        BETWEEN_GATHER "between_gather" in "elementwise/between" takes Between;
        BETWEEN_TURN_PAIRS "between_turn_pairs" in "elementwise/between" takes Between;
        BETWEEN_SPLIT_PAIRS "between_split_pairs" in "elementwise/between" takes Between;
        GEMV_FUSED_BF16 "gemv_fused_bf16_bf16" in "gemv/fused_bf16" takes GemvFused;
        ATTENTION_STORE_KV "attention_store_kv" in "attention/paged" takes Attention;
        ATTENTION_1 "attention_1" in "attention/paged" takes Attention;
        ATTENTION_2 "attention_2" in "attention/paged" takes Attention;
        ATTENTION_4 "attention_4" in "attention/paged" takes Attention;
        ATTENTION_PARTITION_1 "attention_partition_1" in "attention/paged" takes Attention;
        ATTENTION_PARTITION_2 "attention_partition_2" in "attention/paged" takes Attention;
        ATTENTION_PARTITION_4 "attention_partition_4" in "attention/paged" takes Attention;
        ATTENTION_COMBINE "attention_combine" in "attention/paged" takes Attention;
        ATTENTION_SPLIT_K_2 "attention_split_k_2" in "attention/split_k" takes Attention;
        ATTENTION_SPLIT_K_4 "attention_split_k_4" in "attention/split_k" takes Attention;
        ATTENTION_DECODE_F32_1 "attention_decode_f32_1" in "attention/decode" takes Attention;
        ATTENTION_DECODE_F32_2 "attention_decode_f32_2" in "attention/decode" takes Attention;
        ATTENTION_DECODE_F32_4 "attention_decode_f32_4" in "attention/decode" takes Attention;
        ATTENTION_DECODE_F16_1 "attention_decode_f16_1" in "attention/decode" takes Attention;
        ATTENTION_DECODE_F16_2 "attention_decode_f16_2" in "attention/decode" takes Attention;
        ATTENTION_DECODE_F16_4 "attention_decode_f16_4" in "attention/decode" takes Attention;
        ATTENTION_DECODE_BF16_1 "attention_decode_bf16_1" in "attention/decode" takes Attention;
        ATTENTION_DECODE_BF16_2 "attention_decode_bf16_2" in "attention/decode" takes Attention;
        ATTENTION_DECODE_BF16_4 "attention_decode_bf16_4" in "attention/decode" takes Attention;
        ATTENTION_DECODE_INT8_1 "attention_decode_int8_1" in "attention/decode" takes Attention;
        ATTENTION_DECODE_INT8_2 "attention_decode_int8_2" in "attention/decode" takes Attention;
        ATTENTION_DECODE_INT8_4 "attention_decode_int8_4" in "attention/decode" takes Attention;
        ATTENTION_DECODE_INT16_1 "attention_decode_int16_1" in "attention/decode" takes Attention;
        ATTENTION_DECODE_INT16_2 "attention_decode_int16_2" in "attention/decode" takes Attention;
        ATTENTION_DECODE_INT16_4 "attention_decode_int16_4" in "attention/decode" takes Attention;
        ATTENTION_PREFILL "attention_prefill" in "attention/prefill" takes Attention;
        ATTENTION_PREFILL_128 "attention_prefill_128" in "attention/prefill" takes Attention;
        ATTENTION_PREFILL_256 "attention_prefill_256" in "attention/prefill" takes Attention;
        ATTENTION_PREFILL_LONG "attention_prefill_long" in "attention/prefill" takes Attention;
        ATTENTION_PREFILL_LOW "attention_prefill_low" in "attention/prefill" takes Attention;
        ATTENTION_INT8_64 "attention_int8_64" in "attention/int8" takes Attention;
        ATTENTION_INT8_128 "attention_int8_128" in "attention/int8" takes Attention;
        ATTENTION_INT8_256 "attention_int8_256" in "attention/int8" takes Attention;
        ATTENTION_INT16_64 "attention_int16_64" in "attention/int16" takes Attention;
        ATTENTION_INT16_128 "attention_int16_128" in "attention/int16" takes Attention;
        ATTENTION_INT16_256 "attention_int16_256" in "attention/int16" takes Attention;
        ATTENTION_INT16_WIDE_128 "attention_int16_wide_128" in "attention/int16_wide" takes Attention;
        LATENT_TURN "latent_turn" in "attention/latent" takes LatentQueries;
        LATENT_ABSORB_1 "latent_absorb_1" in "attention/latent" takes LatentQueries;
        LATENT_ABSORB_4 "latent_absorb_4" in "attention/latent" takes LatentQueries;
        LATENT_ABSORB_16 "latent_absorb_16" in "attention/latent" takes LatentQueries;
        LATENT_ATTEND_F16 "latent_attend_f16" in "attention/latent_rows" takes Attention;
        LATENT_ATTEND_BF16 "latent_attend_bf16" in "attention/latent_rows" takes Attention;
        LATENT_ATTEND_PART_F16 "latent_attend_part_f16" in "attention/latent_rows" takes Attention;
        LATENT_ATTEND_PART_BF16 "latent_attend_part_bf16" in "attention/latent_rows" takes Attention;
        LATENT_HEADS "latent_heads" in "attention/latent" takes LatentHeads;
        LATENT_GATHER "latent_gather" in "attention/latent" takes LatentGather;
        STREAM_WEIGHTS "stream_weights" in "elementwise/streams" takes Streams;
        STREAM_COLLAPSE "stream_collapse" in "elementwise/streams" takes Streams;
        STREAM_ATTEND "stream_attend" in "elementwise/streams" takes Streams;
        STREAM_EXPAND "stream_expand" in "elementwise/streams" takes Streams;
        STREAM_MEAN "stream_mean" in "elementwise/streams" takes Streams;
        COMPRESS_STORE "compress_store" in "attention/compressed" takes Compress;
        COMPRESS_ENTRY "compress_entry" in "attention/compressed" takes Compress;
        COMPRESSED_STORE "compressed_store" in "attention/compressed" takes Compressed;
        COMPRESSED_ATTEND_1 "compressed_attend_1" in "attention/compressed" takes Compressed;
        COMPRESSED_ATTEND_4 "compressed_attend_4" in "attention/compressed" takes Compressed;
        STREAM_GATED_MEAN "stream_gated_mean" in "elementwise/streams" takes Streams;
        STREAM_INJECT "stream_inject" in "elementwise/streams" takes Streams;
        NGRAM_GATE "ngram_gate" in "recurrent/ngrams" takes Ngrams;
        NGRAM_ADD "ngram_add" in "recurrent/ngrams" takes Ngrams;
        INDEX_STORE "index_store" in "attention/index" takes Index;
        INDEX_POOL "index_pool" in "attention/index" takes Index;
        INDEX_SCORES "index_scores" in "attention/index" takes Index;
        INDEX_SELECT "index_select" in "attention/index" takes Index;
        CONVOLVE "convolve" in "recurrent/convolution" takes Convolution;
        CONVOLVE_SLIDE "convolve_slide" in "recurrent/convolution" takes Convolution;
        CONVOLVE_ONE "convolve_one" in "recurrent/convolution" takes Convolution;
        DELTA_GATES "delta_gates" in "delta/prepare" takes Delta;
        DELTA_RECUR "delta_recur" in "delta/recurrence" takes Delta;
        DELTA_RECUR_64 "delta_recur_64" in "delta/recurrence" takes Delta;
        DELTA_RECUR_128 "delta_recur_128" in "delta/recurrence" takes Delta;
        DELTA_RECUR_KEEP_64 "delta_recur_keep_64" in "delta/recurrence" takes Delta;
        DELTA_RECUR_KEEP_128 "delta_recur_keep_128" in "delta/recurrence" takes Delta;
        DELTA_RECUR_CHANNELS_64 "delta_recur_channels_64" in "delta/recurrence" takes Delta;
        DELTA_RECUR_CHANNELS_128 "delta_recur_channels_128" in "delta/recurrence" takes Delta;
        DELTA_RECUR_CHANNELS_KEEP_64 "delta_recur_channels_keep_64" in "delta/recurrence" takes Delta;
        DELTA_RECUR_CHANNELS_KEEP_128 "delta_recur_channels_keep_128" in "delta/recurrence" takes Delta;
        DELTA_NORM "delta_norm" in "delta/recurrence" takes Delta;
        DELTA_DECODE_64 "delta_decode_64" in "delta/decode" takes Delta;
        DELTA_DECODE_128 "delta_decode_128" in "delta/decode" takes Delta;
        DELTA_DECODE_CHANNELS_64 "delta_decode_channels_64" in "delta/decode" takes Delta;
        DELTA_DECODE_CHANNELS_128 "delta_decode_channels_128" in "delta/decode" takes Delta;
        DELTA_DECODE_NORM "delta_decode_norm" in "delta/decode" takes Delta;
        STATE_SPACE_RECUR "state_space_recur" in "recurrent/state_space" takes StateSpace;
        STATE_SPACE_RECUR_64 "state_space_recur_64" in "recurrent/state_space" takes StateSpace;
        STATE_SPACE_RECUR_128 "state_space_recur_128" in "recurrent/state_space" takes StateSpace;
        STATE_SPACE_RECUR_256 "state_space_recur_256" in "recurrent/state_space" takes StateSpace;
        STATE_SPACE_NORM "state_space_norm" in "recurrent/state_space" takes StateSpace;
        MOE_ROUTE "moe_route" in "moe/route" takes Route;
        MOE_COUNT_PAIRS "moe_count_pairs" in "moe/pairs" takes Pairs;
        MOE_GROUP_PAIRS "moe_group_pairs" in "moe/pairs" takes Pairs;
        MOE_ROUTER_FEW "moe_router_few" in "moe/router_few" takes RouterFew;
        MOE_TOPK_FEW "moe_topk_few" in "moe/topk_few" takes TopkFew;
        MOE_GATHER "moe_gather" in "moe/gather" takes Gather;
        MOE_ACTIVATE "moe_activate" in "moe/activate" takes Activate;
        MOE_COMBINE "moe_combine" in "moe/combine" takes Combine;
        MOE_ROUTER_SINGLE "moe_router_single" in "moe/router_single" takes RouterSingle;
        MOE_ROUTER_SINGLE_INT11 "moe_router_single_int11" in "moe/router_single" takes RouterSingle;
        SAMPLE_TOPS "sample_tops" in "sampling/sample" takes Tops;
        SAMPLE_BEST "sample_best" in "sampling/sample" takes Best;
        SAMPLE_SUMS "sample_sums" in "sampling/sample" takes Sums;
    }
    families {
        /// One token, or several each by itself.
        Gemv "gemv" {
            in "gemv/f32" of F32_FORMATS by [""] takes Products;
            in "gemv/bf16" of BF16_FORMATS by [""] takes Products;
            in "gemv/int8" of INT8_FORMATS by ["", "_wide"] takes Products;
            in "gemv/int11" of INT11_FORMATS by [""] takes Products;
            in "gemv/int11_floats" of INT11_FLOAT_FORMATS by [""] takes Products;
            in "gemv/blocks" of BLOCK_FORMATS by [""] takes Products;
            in "gemv/int11_blocks" of INT11_BLOCK_FORMATS by [""] takes Products;
        }
        /// The same with several rows a block.
        GemvRows "gemv_rows" {
            in "gemv/blocks" of BLOCK_FORMATS by [""] takes Products;
        }
        /// Tiles of eight tokens, without tensor cores.
        Gemm8 "gemm_8" {
            in "gemm/f32" of F32_FORMATS by [""] takes Products;
            in "gemm/bf16" of BF16_FORMATS by [""] takes Products;
            in "gemm/int8" of INT8_FORMATS by [""] takes Products;
            in "gemm/int11" of INT11_FORMATS by [""] takes Products;
            in "gemm/int11_floats" of INT11_FLOAT_FORMATS by [""] takes Products;
            in "gemm/blocks" of BLOCK_FORMATS by [""] takes Products;
            in "gemm/int11_blocks" of INT11_BLOCK_FORMATS by [""] takes Products;
        }
        /// Lane sums by tiles of 32 rows and 32 tokens.
        Gemm32 "gemm_32" {
            in "gemm/f32_tiles" of F32_FORMATS by [""] takes Products;
        }
        /// Up to eight tokens, with what comes before the product and behind it.
        GemvBatched "gemv_batched" {
            in "gemv/batched" of INT8_FORMATS by ["_1", "_2", "_4", "_8"] takes GemvBatched;
            in "gemv/batched" of BF16_BF16 by ["_1", "_2", "_4", "_8"] takes GemvBatched;
        }
        /// One token, with what comes before the product and behind it: small blocks, large ones, and large ones with more under way.
        GemvFused "gemv_fused" {
            in "gemv/fused" of INT8_FORMATS by ["", "_wide", "_deep"] takes GemvFused;
            in "gemv/fused_blocks" of BLOCK_FORMATS by ["", "_wide", "_deep"] takes GemvFused;
        }
        /// One token with integers of 11 bits, with what comes before the product and behind it: rows by 32 lanes, and by 16.
        GemvOne "gemv_one" {
            in "gemv/fused_int11" of INT11_FORMATS by ["", "_short"] takes OneToken;
        }
        /// The same with weights that are floats of sixteen bits.
        GemvOneFloats "gemv_one" {
            in "gemv/fused_int11_floats" of INT11_FLOAT_FORMATS by [""] takes OneToken;
        }
        /// The same with weights in blocks.
        GemvOneBlocks "gemv_one" {
            in "gemv/fused_int11_blocks" of INT11_BLOCK_FORMATS by [""] takes OneToken;
        }
        /// Many tokens on tensor cores; tiles by groups of activations in a weight group.
        GemmMma "gemm_mma" {
            in "gemm/mma" of INT8_FORMATS by ["_1", "_2", "_4"] takes Products;
        }
        /// The same with less shared memory.
        GemmMmaLow "gemm_mma" {
            in "gemm/mma_low" of INT8_FORMATS by ["_1_low", "_2_low", "_4_low"] takes Products;
        }
        /// The same for few tokens.
        GemmMmaFew "gemm_mma" {
            in "gemm/mma_few" of INT8_FORMATS by ["_1_few", "_2_few", "_4_few"] takes Products;
        }
        /// Weights in blocks with several tokens on tensor cores: large tiles, and small ones.
        GemmBlocks "gemm_blocks" {
            in "gemm/blocks_mma" of BLOCK_FORMATS by ["", "_few"] takes Products;
        }
        /// Few tokens on tensor cores by sets of sixteen rows, for up to so many tokens of a block.
        GemmSets "gemm_sets" {
            in "gemm/sets" of BYTE_FORMATS by ["_8", "_16", "_24", "_32"] takes Products;
        }
        /// Integers of 11 bits for up to eight tokens on tensor cores.
        GemmFew "gemm_few" {
            in "gemm/int11_few" of INT11_TENSOR_FORMATS by ["_1", "_2", "_4", "_8"] takes Products;
            in "gemm/int11_floats_few" of INT11_FLOAT_FORMATS by ["_1", "_2", "_4", "_8"] takes Products;
        }
        /// The same of a mixture, whose pairs are sorted by expert, for tiles of up to four and up to eight.
        GemmFewGrouped "gemm_few" {
            in "gemm/int11_few" of INT11_TENSOR_FORMATS by ["_4_grouped", "_8_grouped"] takes Products;
        }
        /// Integers of 11 bits for up to so many tokens, on compute capability 9.0; of a mixture, whose pairs are sorted by expert.
        GemmNarrow "gemm_narrow" {
            in "gemm/int11_narrow" of INT11_TENSOR_FORMATS by ["_16", "_32", "_64", "_16_grouped"] takes Products;
        }
        /// Integers of 11 bits for prompts, by wgmma; of a mixture, whose pairs are sorted by expert.
        GemmWide "gemm_wide" {
            in "gemm/int11_wide" of INT11_TENSOR_FORMATS by ["", "_grouped"] takes Products;
            in "gemm/int11_floats_wide" of INT11_FLOAT_FORMATS by [""] takes Products;
        }
        /// The same without wgmma.
        GemmSlices "gemm_slices" {
            in "gemm/int11_floats_mma" of INT11_FLOAT_FORMATS by [""] takes Products;
        }
        /// Integers of 11 bits that are made of weights for these.
        Int11Split "int11_split" {
            in "gemm/int11_split" of INT11_FLOAT_FORMATS by [""] takes Split;
        }
        /// Experts that have a few tokens each: one product, or gate and up.
        GroupedGemm "grouped_gemm" {
            in "moe/grouped" of INT8_FORMATS by ["", "_gated"] takes GroupedGemm;
        }
        /// Gate and up of one token's experts, where all are on the device, and where the host may have to bring some.
        MoeGateUp "moe_gate_up" {
            in "moe/single" of INT8_FORMATS by ["", "_mailbox"] takes SingleToken;
            in "moe/single_int11" of INT11_FORMATS by ["", "_mailbox"] takes SingleToken;
        }
        /// Down of one token's experts.
        MoeDown "moe_down" {
            in "moe/single" of INT8_FORMATS by [""] takes SingleToken;
            in "moe/single_int11" of INT11_FORMATS by [""] takes SingleToken;
        }
    }
}

const BF16_BF16: &[KernelFormat] = &[KernelFormat::Bf16Bf16];

/// How many kernels there are.
const COUNT: usize = {
    let (mut count, mut i) = (SINGLES.len(), 0);
    while i < INSTANCES.len() {
        count += INSTANCES[i].formats.len() * INSTANCES[i].tiles.len();
        i += 1;
    }
    count
};

/// For each family and format: the number of its first tile's kernel, and how many tiles there are.
const FIRST: [[(u16, u16); KernelFormat::ALL.len()]; FAMILIES.len()] = {
    let mut first = [[(0, 0); KernelFormat::ALL.len()]; FAMILIES.len()];
    let (mut next, mut i) = (SINGLES.len() as u16, 0);
    while i < INSTANCES.len() {
        let of = &INSTANCES[i];
        let (tiles, mut f) = (of.tiles.len() as u16, 0);
        while f < of.formats.len() {
            first[of.family as usize][of.formats[f] as usize] = (next, tiles);
            next += tiles;
            f += 1;
        }
        i += 1;
    }
    first
};

/// Bytes of the struct that each kernel takes.
const PARAMETERS: [u16; COUNT] = {
    let mut all = [0; COUNT];
    let mut i = 0;
    while i < SINGLES.len() {
        all[i] = SINGLES[i].2 as u16;
        i += 1;
    }
    let (mut next, mut i) = (SINGLES.len(), 0);
    while i < INSTANCES.len() {
        let mut k = INSTANCES[i].formats.len() * INSTANCES[i].tiles.len();
        while k > 0 {
            all[next] = INSTANCES[i].parameters as u16;
            next += 1;
            k -= 1;
        }
        i += 1;
    }
    all
};

const fn is_same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

impl Kernel {
    const fn single(name: &str) -> Kernel {
        let mut i = 0;
        while !is_same(SINGLES[i].0, name) {
            i += 1;
        }
        Kernel(i as u16)
    }

    /// The instance of a family for a format and a tile, counted as the family lists them; `None` where there is none.
    pub fn of(family: Family, format: KernelFormat, tile: usize) -> Option<Kernel> {
        let (first, tiles) = FIRST[family as usize][format as usize];
        (tile < usize::from(tiles)).then(|| Kernel(first + tile as u16))
    }

    pub fn all() -> impl ExactSizeIterator<Item = Kernel> {
        (0..COUNT).map(|i| Kernel(i as u16))
    }

    /// Its number: less than [`Kernel::all`] has.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// # Panics
    /// Where there is no such kernel.
    pub fn from_index(index: usize) -> Kernel {
        assert!(index < COUNT, "kernel {index} of {COUNT}");
        Kernel(index as u16)
    }

    /// Bytes of the struct that it takes.
    pub fn parameters(self) -> usize {
        usize::from(PARAMETERS[self.index()])
    }

    /// Its name in its module.
    pub fn name(self) -> Cow<'static, str> {
        match self.instance() {
            None => SINGLES[self.index()].0.into(),
            Some((of, format, tile)) => {
                format!("{}_{}{}", FAMILIES[of.family as usize].1, format.name(), of.tiles[tile]).into()
            }
        }
    }

    /// The unit that it is in: a `.cu` file of `kernels`, without that ending.
    pub fn unit(self) -> &'static str {
        self.instance().map_or_else(|| SINGLES[self.index()].1, |(of, ..)| of.unit)
    }

    /// The only compute capability that has its instructions (90 for 9.0); `None`: it is for all.
    pub fn only(self) -> Option<i32> {
        // `specific` of `kernels/nvrtc.json`.
        matches!(
            self.unit(),
            "attention/int16_wide" | "gemm/int11_wide" | "gemm/int11_floats_wide" | "gemm/int11_records_wide"
        )
        .then_some(90)
    }

    fn instance(self) -> Option<(&'static Instances, KernelFormat, usize)> {
        let mut left = self.index().checked_sub(SINGLES.len())?;
        for of in INSTANCES {
            let count = of.formats.len() * of.tiles.len();
            if left < count {
                return Some((of, of.formats[left / of.tiles.len()], left % of.tiles.len()));
            }
            left -= count;
        }
        None
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn numbers_are_dense_and_names_differ() {
        let names: BTreeSet<_> = Kernel::all().map(Kernel::name).collect();
        assert_eq!(names.len(), Kernel::all().len());
        for (i, kernel) in Kernel::all().enumerate() {
            assert_eq!(kernel.index(), i);
            assert!(kernel.parameters() > 0, "{kernel:?}");
        }
    }

    #[test]
    fn an_instance_is_found_by_family_format_and_tile() {
        for kernel in Kernel::all() {
            let Some((of, format, tile)) = kernel.instance() else { continue };
            assert_eq!(Kernel::of(of.family, format, tile), Some(kernel));
        }
        let found = Kernel::of(Family::GemvFused, KernelFormat::Q4Int8, 2).unwrap();
        assert_eq!((&*found.name(), found.unit()), ("gemv_fused_q4_int8_deep", "gemv/fused"));
        assert_eq!(Kernel::of(Family::GemmSets, KernelFormat::Q3Int8, 0), None);
        assert_eq!(Kernel::of(Family::GemmSets, KernelFormat::Q4Int8, 4), None);
    }
}
