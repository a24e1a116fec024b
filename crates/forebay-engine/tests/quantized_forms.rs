//! Forms of quantised folders that no reference folder has: scales for each row or each matrix, other types of scales, other
//! formats of zero points, MXFP4 of compressed-tensors, quantised output projections. Each folder must give the logits of a
//! folder that holds its values in F32.

mod support;

use forebay_engine::{Session, SessionOptions};
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use support::{e4m3, write_safetensors};

const HIDDEN: usize = 128;
const WIDTH: usize = 256;
const VOCABULARY: usize = 96;

/// The matrices of the only layer and the output projection: name, rows and columns.
const MATRICES: [(&str, usize, usize); 8] = [
    ("model.layers.0.self_attn.q_proj", 128, HIDDEN),
    ("model.layers.0.self_attn.k_proj", 64, HIDDEN),
    ("model.layers.0.self_attn.v_proj", 64, HIDDEN),
    ("model.layers.0.self_attn.o_proj", HIDDEN, 128),
    ("model.layers.0.mlp.gate_proj", WIDTH, HIDDEN),
    ("model.layers.0.mlp.up_proj", WIDTH, HIDDEN),
    ("model.layers.0.mlp.down_proj", HIDDEN, WIDTH),
    ("lm_head", VOCABULARY, HIDDEN),
];

#[derive(Default)]
struct Folder {
    table: Map<String, Value>,
    data: Vec<u8>,
}

impl Folder {
    fn add(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) {
        let start = self.data.len();
        self.data.extend(bytes);
        let offsets = [start, self.data.len()];
        let tensor = json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets });
        self.table.insert(name.into(), tensor);
    }

    fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.add(name, "F32", shape, &bytes);
    }

    /// Writes the folder with everything but [`MATRICES`], and returns the logits of some tokens.
    fn logits(mut self, quantization: Value) -> Result<Vec<f32>, String> {
        let mut random = Random(5);
        let values: Vec<f32> = (0..VOCABULARY * HIDDEN).map(|_| random.unit()).collect();
        self.floats("model.embed_tokens.weight", &[VOCABULARY, HIDDEN], &values);
        for name in ["layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"] {
            self.floats(&format!("model.{name}.weight"), &[HIDDEN], &[1.0; HIDDEN]);
        }
        let config = json!({
            "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 256, "tie_word_embeddings": false, "hidden_act": "silu",
            "quantization_config": quantization,
        });
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        write_safetensors(folder.path(), &self.table, &self.data);
        let options =
            SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
        let mut session = Session::open(folder.path(), &options, &mut |_, _| {})
            .map_err(|error| error.to_string())?;
        let tokens: Vec<u32> = (0..20).map(|index| (index * 31 + 5) % VOCABULARY as u32).collect();
        Ok(session.logits(&tokens, None).unwrap())
    }
}

/// A small generator of reproducible numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    fn unit(&mut self) -> f32 {
        (self.next() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// A positive number around 0.01.
    fn scale(&mut self) -> f32 {
        0.01 + 0.005 * self.unit()
    }
}

/// A matrix that a form adds to a folder.
struct Matrix<'a> {
    to: &'a mut Folder,
    random: &'a mut Random,
    name: &'a str,
    rows: usize,
    cols: usize,
}

impl Matrix<'_> {
    /// Adds tensor `NAME.part`.
    fn add(&mut self, part: &str, dtype: &str, shape: &[usize], bytes: &[u8]) {
        self.to.add(&format!("{}.{part}", self.name), dtype, shape, bytes);
    }

    fn add_words(&mut self, part: &str, shape: &[usize], words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.add(part, "I32", shape, &bytes);
    }

    /// Adds one number.
    fn add_float(&mut self, part: &str, value: f32) {
        self.to.floats(&format!("{}.{part}", self.name), &[], &[value]);
    }

    /// Draws the matrix as E4M3 codes below 2 and adds it. Returns the codes.
    fn draw_e4m3(&mut self) -> Vec<u8> {
        let count = self.rows * self.cols;
        let codes: Vec<u8> = (0..count).map(|_| self.random.next() as u8 & 0xbf).collect();
        self.add("weight", "F8_E4M3", &[self.rows, self.cols], &codes);
        codes
    }

    /// Draws F16 scales and adds them. Returns their values.
    fn draw_f16_scales(&mut self, part: &str, shape: [usize; 2]) -> Vec<f32> {
        let count = shape[0] * shape[1];
        let scales: Vec<f16> = (0..count).map(|_| f16::from_f32(self.random.scale())).collect();
        let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.add(part, "F16", &shape, &bytes);
        scales.into_iter().map(f16::to_f32).collect()
    }

    /// Draws scales that are powers of two and adds them. Returns their values.
    fn draw_e8m0_scales(&mut self, part: &str, dtype: &str, shape: [usize; 2]) -> Vec<f32> {
        let count = shape[0] * shape[1];
        let scales: Vec<u8> = (0..count).map(|_| 119 + self.random.next() as u8 % 3).collect();
        self.add(part, dtype, &shape, &scales);
        scales.into_iter().map(|scale| 2f32.powi(i32::from(scale) - 127)).collect()
    }

    /// Draws the matrix as codes of four bits and adds it with a shape of its own. Returns a code for each value.
    fn draw_nibbles(&mut self, dtype: &str, shape: [usize; 2]) -> Vec<u32> {
        let count = self.rows * self.cols;
        let bytes: Vec<u8> = (0..count / 2).map(|_| self.random.next() as u8).collect();
        self.add("weight_packed", dtype, &shape, &bytes);
        (0..count).map(|i| nibble(bytes[i / 2].into(), i % 2)).collect()
    }
}

/// Adds a matrix in some form. Returns its values.
type Form = fn(&mut Matrix<'_>) -> Vec<f32>;

/// Returns the group of four bits with number `index`, counted from the lowest bits of a word.
fn nibble(word: u32, index: usize) -> u32 {
    word >> (4 * index) & 15
}

fn fp8_by_row(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let codes = matrix.draw_e4m3();
    let scales: Vec<bf16> = (0..rows).map(|_| bf16::from_f32(matrix.random.scale())).collect();
    let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    matrix.add("weight_scale", "BF16", &[rows, 1], &bytes);
    let value = |(i, code): (usize, &u8)| e4m3(*code) * scales[i / cols].to_f32();
    codes.iter().enumerate().map(value).collect()
}

fn fp8_of_one(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let codes = matrix.draw_e4m3();
    let scale = matrix.random.scale();
    matrix.add_float("weight_scale", scale);
    matrix.add_float("input_scale", 0.5);
    codes.iter().map(|code| e4m3(*code) * scale).collect()
}

/// Scales that are powers of two, for tiles of 64 x 32.
fn fp8_by_tile(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let cols = matrix.cols;
    let codes = matrix.draw_e4m3();
    let (high, wide) = (matrix.rows.div_ceil(64), cols / 32);
    let scales = matrix.draw_e8m0_scales("weight_scale_inv", "F8_E8M0", [high, wide]);
    let scale = |i: usize| scales[i / cols / 64 * wide + i % cols / 32];
    codes.iter().enumerate().map(|(i, code)| e4m3(*code) * scale(i)).collect()
}

fn mxfp4(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let codes = matrix.draw_nibbles("U8", [rows, cols / 2]);
    let scales = matrix.draw_e8m0_scales("weight_scale", "U8", [rows, cols / 32]);
    let value = |(i, code): (usize, &u32)| {
        let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][*code as usize & 7];
        if *code < 8 { scales[i / 32] * magnitude } else { -scales[i / 32] * magnitude }
    };
    codes.iter().enumerate().map(value).collect()
}

/// Symmetric integers in groups of `GROUP` with F16 scales.
fn int4<const GROUP: usize>(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let codes = matrix.draw_nibbles("I32", [rows, cols / 8]);
    let scales = matrix.draw_f16_scales("weight_scale", [rows, cols / GROUP]);
    let value = |(i, code): (usize, &u32)| (*code as f32 - 8.0) * scales[i / GROUP];
    codes.iter().enumerate().map(value).collect()
}

/// Four integers of 8 bits in a word, with the zero point 128 and BF16 scales of rows. F16 does not hold small ones.
fn int8_packed<const SMALL: bool>(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let words: Vec<u32> = (0..rows * cols / 4).map(|_| matrix.random.next()).collect();
    matrix.add_words("weight_packed", &[rows, cols / 4], &words);
    let factor = if SMALL { 1e-4 } else { 0.1 };
    let scales: Vec<bf16> =
        (0..rows).map(|_| bf16::from_f32(matrix.random.scale() * factor)).collect();
    let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    matrix.add("weight_scale", "BF16", &[rows, 1], &bytes);
    let value = |i: usize| {
        let code = words[i / 4] >> (8 * (i % 4)) & 255;
        (code as f32 - 128.0) * scales[i / cols].to_f32()
    };
    (0..rows * cols).map(value).collect()
}

/// Signed bytes in groups of 32 with F16 scales.
fn int8_by_group(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let codes: Vec<u8> = (0..rows * cols).map(|_| matrix.random.next() as u8).collect();
    matrix.add("weight", "I8", &[rows, cols], &codes);
    let scales = matrix.draw_f16_scales("weight_scale", [rows, cols / 32]);
    let value = |(i, code): (usize, &u8)| f32::from(*code as i8) * scales[i / 32];
    codes.iter().enumerate().map(value).collect()
}

/// NF4 in blocks of 64 with values of its own. With double quantisation, U8 scales in blocks of 16.
fn nf4<const NESTED: bool>(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let (rows, cols, count) = (matrix.rows, matrix.cols, matrix.rows * matrix.cols);
    let codes: Vec<u8> = (0..count / 2).map(|_| matrix.random.next() as u8).collect();
    matrix.add("weight", "U8", &[count / 2, 1], &codes);
    let mut floats = |part: &str, count: usize, of: &mut dyn FnMut(&mut Random) -> f32| {
        let values: Vec<f32> = (0..count).map(|_| of(matrix.random)).collect();
        matrix.to.floats(&format!("{}.weight.{part}", matrix.name), &[count], &values);
        values
    };
    let values = floats("quant_map", 16, &mut Random::unit);
    let blocks = count / 64;
    let mut state =
        json!({ "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [rows, cols] });
    let scales: Vec<f32> = if NESTED {
        let outer = floats("nested_absmax", blocks.div_ceil(16), &mut |of| 4.0 * of.scale());
        let inner = floats("nested_quant_map", 256, &mut Random::unit);
        state["nested_blocksize"] = json!(16);
        state["nested_offset"] = json!(0.0625);
        let codes: Vec<u8> = (0..blocks).map(|_| matrix.random.next() as u8).collect();
        matrix.add("weight.absmax", "U8", &[blocks], &codes);
        let scale = |(i, code): (usize, &u8)| inner[usize::from(*code)] * outer[i / 16] + 0.0625;
        codes.iter().enumerate().map(scale).collect()
    } else {
        floats("absmax", blocks, &mut |of| 4.0 * of.scale())
    };
    let state = state.to_string();
    let name = "weight.quant_state.bitsandbytes__nf4";
    matrix.add(name, "U8", &[state.len()], state.as_bytes());
    let code = |i: usize| codes[i / 2] >> (4 * (1 - i % 2)) & 15;
    (0..count).map(|i| values[usize::from(code(i))] * scales[i / 64]).collect()
}

/// GPTQ with zero points as they are, in groups of 32, and the order of columns: adjacent ones have a group, or all take
/// turns.
fn gptq_v2<const TURNS: bool>(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let groups = cols / 32;
    let group_of = |col: usize| if TURNS { col % groups } else { col / 32 };
    let codes: Vec<u32> = (0..cols / 8 * rows).map(|_| matrix.random.next()).collect();
    let zeros: Vec<u32> = (0..groups * rows / 8).map(|_| matrix.random.next()).collect();
    let order: Vec<u32> = (0..cols).map(|col| group_of(col) as u32).collect();
    matrix.add_words("qweight", &[cols / 8, rows], &codes);
    matrix.add_words("qzeros", &[groups, rows / 8], &zeros);
    matrix.add_words("g_idx", &[cols], &order);
    let scales = matrix.draw_f16_scales("scales", [groups, rows]);
    let value = |i: usize| {
        let (row, col) = (i / cols, i % cols);
        let code = nibble(codes[col / 8 * rows + row], col % 8);
        let at = group_of(col) * rows + row;
        let zero = nibble(zeros[at / 8], row % 8);
        (code as f32 - zero as f32) * scales[at]
    };
    (0..rows * cols).map(value).collect()
}

/// AWQ by rows in groups of `GROUP`, with places for twelve more groups.
fn awq_rows<const GROUP: usize>(matrix: &mut Matrix<'_>) -> Vec<f32> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let width = (cols / GROUP + 12).div_ceil(8);
    let codes: Vec<u32> = (0..rows * cols / 8).map(|_| matrix.random.next()).collect();
    let zeros: Vec<u32> = (0..rows * width).map(|_| matrix.random.next()).collect();
    matrix.add_words("qweight", &[rows, cols / 8], &codes);
    matrix.add_words("qzeros", &[rows, width], &zeros);
    let scales = matrix.draw_f16_scales("scales", [rows, 8 * width]);
    let value = |i: usize| {
        let (row, group) = (i / cols, i % cols / GROUP);
        let zero = nibble(zeros[row * width + group / 8], group % 8);
        (nibble(codes[i / 8], i % 8) as f32 - zero as f32) * scales[row * 8 * width + group]
    };
    (0..rows * cols).map(value).collect()
}

fn compressed(weights: Value) -> Value {
    json!({ "quant_method": "compressed-tensors", "config_groups": { "group_0": { "weights": weights } } })
}

/// Returns every form with its name and configuration.
fn forms() -> [(&'static str, Form, Value); 15] {
    let fp8 = |strategy: &str| {
        compressed(json!({ "type": "float", "num_bits": 8, "strategy": strategy }))
    };
    let integers = |bits: usize, group: Option<usize>| {
        compressed(
            json!({ "type": "int", "num_bits": bits, "group_size": group, "symmetric": true }),
        )
    };
    let gptq = json!({ "quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "lm_head": true });
    let ordered = json!({ "quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "desc_act": true });
    let bitsandbytes = json!({ "quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4" });
    let awq = |group: usize| json!({ "quant_method": "awq", "bits": 4, "version": "gemv", "group_size": group });
    [
        ("FP8 by row", fp8_by_row, fp8("channel")),
        (
            "FP8 with one scale",
            fp8_of_one,
            json!({ "quant_method": "modelopt", "quant_algo": "FP8" }),
        ),
        (
            "FP8 by tile",
            fp8_by_tile,
            json!({ "quant_method": "fp8", "weight_block_size": [64, 32] }),
        ),
        ("MXFP4", mxfp4, compressed(json!({ "type": "float", "num_bits": 4, "group_size": 32 }))),
        ("integers by 64", int4::<64>, integers(4, Some(64))),
        ("integers by 128", int4::<128>, integers(4, Some(128))),
        ("8 bits by row", int8_packed::<false>, integers(8, None)),
        ("8 bits with small scales", int8_packed::<true>, integers(8, None)),
        ("8 bits by 32", int8_by_group, integers(8, Some(32))),
        ("GPTQ v2", gptq_v2::<false>, gptq),
        ("GPTQ v2 in any order", gptq_v2::<true>, ordered),
        ("AWQ by rows of 32", awq_rows::<32>, awq(32)),
        ("AWQ by rows of 64", awq_rows::<64>, awq(64)),
        ("NF4", nf4::<false>, bitsandbytes.clone()),
        ("NF4 twice", nf4::<true>, bitsandbytes),
    ]
}

#[test]
fn every_form_gives_the_logits_of_its_values() {
    for (what, form, quantization) in forms() {
        let (mut folder, mut plain) = (Folder::default(), Folder::default());
        let mut random = Random(9);
        for (name, rows, cols) in MATRICES {
            // One matrix is left out of the quantisation.
            if name.ends_with("v_proj") {
                let values: Vec<f32> = (0..rows * cols).map(|_| 0.1 * random.unit()).collect();
                folder.floats(&format!("{name}.weight"), &[rows, cols], &values);
                plain.floats(&format!("{name}.weight"), &[rows, cols], &values);
                continue;
            }
            let (to, random) = (&mut folder, &mut random);
            let values = form(&mut Matrix { to, random, name, rows, cols });
            plain.floats(&format!("{name}.weight"), &[rows, cols], &values);
        }
        let found = folder.logits(quantization).unwrap_or_else(|error| panic!("{what}: {error}"));
        let expected = plain.logits(Value::Null).unwrap();
        let largest = expected.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
        let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0_f32, f32::max);
        assert!(worst <= 1e-5 * largest, "{what}: {worst} of {largest}");
    }
}
