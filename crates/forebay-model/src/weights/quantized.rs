//! Matrices of quantised Hugging Face folders: tensors of codes, scales and zero points that blocks join when they are
//! read (`forebay-format`'s `quantized`).

use forebay_format::quantized::{Form, Quantized, Scales, is_scale};
use forebay_format::{Block, Extent, Step, TensorInfo, TensorType};

use super::parts::{HeadMatrices, PartMatrix};
use super::tensors::{PACKED, Tensors, expect_contiguous, expect_lengths, expect_type};
use crate::ModelError;
use crate::arch::{Latent, Method, Quantization};

/// A matrix, the extents that hold it, and the step that makes its part of a block of them. Without a step, the only
/// extent is the part.
pub struct MatrixSource {
    pub matrix: PartMatrix,
    pub extents: Vec<Extent>,
    pub step: Option<Step>,
}

impl MatrixSource {
    /// Adds the extents to a block. Returns the matrix as the block's next part.
    pub fn push(self, block: &mut Block) -> PartMatrix {
        let part = match self.step {
            None => block.push(self.extents[0]),
            Some(step) => block.push_quantized(&self.extents, step),
        };
        PartMatrix { part, ..self.matrix }
    }
}

/// Tensors of one quantised matrix.
struct Stored<'a> {
    tensors: &'a Tensors<'a>,
    /// Name of the matrix without `.weight`.
    stem: &'a str,
    rows: usize,
    cols: usize,
}

impl Tensors<'_> {
    /// Returns true if there is such a matrix, quantised or not.
    pub fn has_matrix(&self, name: &str) -> bool {
        self.optional(name).is_some() || self.is_packed(name)
    }

    /// Returns true if the matrix is in packed codes, which have other names.
    pub fn is_packed(&self, name: &str) -> bool {
        self.has_packed()
            && name.strip_suffix(".weight").is_some_and(|stem| {
                PACKED.iter().any(|suffix| self.optional(&format!("{stem}{suffix}")).is_some())
            })
    }

    /// Returns true if the matrix consists of codes and scales.
    pub fn is_quantized(&self, name: &str) -> bool {
        let has_scale = || {
            let stem = name.strip_suffix(".weight").unwrap_or(name);
            [".weight_scale_inv", ".weight_scale", "_scale_inv", "_scale", ".scale"]
                .iter()
                .any(|suffix| self.optional(&format!("{stem}{suffix}")).is_some())
        };
        let is_code = |tensor: &TensorInfo| match tensor.ty {
            TensorType::F8_E4M3 => self.quantization().is_some() || has_scale(),
            TensorType::U8 | TensorType::I8 => has_scale(),
            _ => false,
        };
        self.is_packed(name) || self.optional(name).is_some_and(is_code)
    }

    /// Returns a matrix `[rows, cols]`, whether it is quantised or not.
    pub fn source(&self, name: &str, rows: usize, cols: usize) -> Result<MatrixSource, ModelError> {
        if !self.is_quantized(name) {
            let (matrix, extent) = self.matrix(name, rows, cols)?;
            return Ok(MatrixSource { matrix, extents: vec![extent], step: None });
        }
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        let stored = Stored { tensors: self, stem, rows, cols };
        let method = self.quantization().map(|how| how.method);
        match method {
            Some(Method::Gptq { zero_offset }) => stored.gptq(zero_offset),
            Some(Method::Awq) => stored.awq(),
            _ if self.is_packed(name) => stored.packed(),
            _ => match self.optional(name).map(|tensor| tensor.ty) {
                Some(TensorType::F8_E4M3) => stored.fp8(self.quantization()),
                Some(TensorType::I8) => stored.mxfp4(["weight", "scale"]),
                _ => stored.modelopt(),
            },
        }
    }
}

impl Stored<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.stem)
    }

    fn unusable(&self, suffix: &str, value: String, expected: &str) -> ModelError {
        ModelError::BadValue { key: self.name(suffix), value, expected: expected.into() }
    }

    /// Returns the extent of a tensor of this shape and one of these types.
    fn tensor(
        &self,
        suffix: &str,
        types: &[TensorType],
        shape: &[usize],
    ) -> Result<Extent, ModelError> {
        let tensor = self.tensors.find(&self.name(suffix))?;
        expect_lengths(tensor, shape)?;
        expect_contiguous(tensor)?;
        expect_type(tensor, types)?;
        Ok(tensor.extent)
    }

    /// Refuses a tensor that would change what the others mean.
    fn refuse(&self, suffix: &str, why: &str) -> Result<(), ModelError> {
        match self.tensors.optional(&self.name(suffix)) {
            None => Ok(()),
            Some(_) => Err(self.unusable(suffix, "there".into(), why)),
        }
    }

    /// Checks that rows are whole blocks of `elements`.
    fn expect_columns(&self, suffix: &str, elements: usize) -> Result<(), ModelError> {
        match self.cols.is_multiple_of(elements) {
            true => Ok(()),
            false => {
                let expected = format!("rows must be multiples of {elements}");
                Err(self.unusable(suffix, format!("of {} columns", self.cols), &expected))
            }
        }
    }

    fn source(&self, form: Form, ty: TensorType, extents: Vec<Extent>) -> MatrixSource {
        let (rows, cols) = (self.rows, self.cols);
        let of = Quantized { form, ty, rows, cols };
        let matrix = PartMatrix { part: 0, ty, rows, cols };
        MatrixSource { matrix, extents, step: Some(Step::Quantized { first: 0, of }) }
    }

    /// E4M3 with one scale, or one for each row or each tile.
    fn fp8(&self, quantization: Option<Quantization>) -> Result<MatrixSource, ModelError> {
        let (rows, cols) = (self.rows, self.cols);
        self.refuse("pre_quant_scale", "forebay does not scale activations")?;
        let mut extents = vec![self.tensor("weight", &[TensorType::F8_E4M3], &[rows, cols])?];
        // DeepSeek's own names, those of its folders for transformers, and those of others.
        let names = ["scale", "weight_scale_inv"].into_iter();
        let mut found = names.filter(|name| self.tensors.optional(&self.name(name)).is_some());
        let suffix = found.next().unwrap_or("weight_scale");
        let tensor = self.tensors.find(&self.name(suffix))?;
        let shape: Vec<usize> = tensor.shape.iter().map(|&length| length as usize).collect();
        let tile = quantization.and_then(|how| how.tile);
        let tiles = tile.map(|[high, wide]| [rows.div_ceil(high), cols.div_ceil(wide)]);
        let scales = match (shape.as_slice(), tile) {
            // An exponent alone is the scale of the only tile.
            ([] | [1] | [1, 1], _) if tensor.ty != TensorType::F8_E8M0 => {
                Scales::One(self.tensors.scalar(&tensor.name)?.to_bits())
            }
            (shape, Some([high, wide])) if Some(shape) == tiles.as_ref().map(|of| &of[..]) => {
                Scales::Tiles { ty: tensor.ty, rows: high, cols: wide }
            }
            ([of] | [of, 1], _) if *of == rows => Scales::Tiles { ty: tensor.ty, rows: 1, cols },
            _ => {
                let expected = format!(
                    "scales of a matrix {rows} x {cols} are one, one for each row, or one for each tile of \
                     weight_block_size"
                );
                return Err(self.unusable(suffix, format!("of shape {shape:?}"), &expected));
            }
        };
        let mut wide = cols;
        if let Scales::Tiles { ty, cols, .. } = scales {
            if !is_scale(ty) {
                return Err(ModelError::TensorType { name: tensor.name.clone(), found: ty.name() });
            }
            wide = wide.min(cols);
            expect_contiguous(tensor)?;
            extents.push(tensor.extent);
        }
        let fits = |block: usize| {
            cols.is_multiple_of(block) && (wide == cols || wide.is_multiple_of(block))
        };
        let ty = match (fits(128), fits(32)) {
            (true, _) => TensorType::F8_B128,
            (_, true) => TensorType::F8_B32,
            _ => {
                self.expect_columns("weight", 32)?;
                let expected = "the columns of a tile must be a multiple of 32";
                return Err(self.unusable(
                    suffix,
                    format!("for tiles of {wide} columns"),
                    expected,
                ));
            }
        };
        Ok(self.source(Form::Fp8 { scales }, ty, extents))
    }

    fn nvfp4(&self, codes: &str, factor: f32) -> Result<MatrixSource, ModelError> {
        self.expect_columns(codes, 64)?;
        let (rows, cols) = (self.rows, self.cols);
        let extents = vec![
            self.tensor(codes, &[TensorType::U8], &[rows, cols / 2])?,
            self.tensor("weight_scale", &[TensorType::F8_E4M3], &[rows, cols / 16])?,
        ];
        let form = Form::Nvfp4 { factor: factor.to_bits() };
        Ok(self.source(form, TensorType::NVFP4_F32, extents))
    }

    /// NVFP4 as ModelOpt writes it.
    fn modelopt(&self) -> Result<MatrixSource, ModelError> {
        self.refuse("pre_quant_scale", "forebay does not scale activations")?;
        let factor = self.tensors.scalar(&self.name("weight_scale_2"))?;
        self.nvfp4("weight", factor)
    }

    /// NVFP4, MXFP4 or integers of 4 bits as compressed-tensors writes them.
    fn packed(&self) -> Result<MatrixSource, ModelError> {
        let codes = self.tensors.find(&self.name("weight_packed"))?;
        let scales = self.tensors.find(&self.name("weight_scale"))?;
        match (codes.ty, scales.ty) {
            (TensorType::U8, TensorType::F8_E4M3) => {
                let name = self.name("weight_global_scale");
                let divisor = self.tensors.scalar(&name)?;
                let factor = 1.0 / divisor;
                if !factor.is_finite() {
                    return Err(self.unusable(
                        "weight_global_scale",
                        divisor.to_string(),
                        "it must be a divisor",
                    ));
                }
                self.nvfp4("weight_packed", factor)
            }
            (TensorType::U8, TensorType::U8 | TensorType::F8_E8M0) => {
                self.mxfp4(["weight_packed", "weight_scale"])
            }
            (TensorType::I32, scale) => self.int4(scale, &scales.shape),
            (found, _) => {
                Err(ModelError::TensorType { name: codes.name.clone(), found: found.name() })
            }
        }
    }

    /// MXFP4 in tensors of codes and of scales with these names. Both may have any type of one byte.
    fn mxfp4(&self, [codes, scales]: [&str; 2]) -> Result<MatrixSource, ModelError> {
        self.expect_columns(codes, 32)?;
        let (rows, cols) = (self.rows, self.cols);
        let extents = vec![
            self.tensor(codes, &[TensorType::U8, TensorType::I8], &[rows, cols / 2])?,
            self.tensor(scales, &[TensorType::U8, TensorType::F8_E8M0], &[rows, cols / 32])?,
        ];
        let step = Step::Mxfp4 { blocks: 0, scales: 1, rows, row_blocks: cols / 32, turns: 1 };
        let matrix = PartMatrix { part: 0, ty: TensorType::MXFP4, rows, cols };
        Ok(MatrixSource { matrix, extents, step: Some(step) })
    }

    /// Returns the number of columns that share a scale, if `groups` of them make a row.
    fn group(&self, suffix: &str, groups: u64) -> Result<usize, ModelError> {
        let groups = usize::try_from(groups).unwrap_or(usize::MAX);
        let group = self.cols.checked_div(groups).unwrap_or(0);
        if group.checked_mul(groups) != Some(self.cols) || !group.is_multiple_of(32) || group == 0 {
            let expected = format!("groups of {} columns must be multiples of 32", self.cols);
            return Err(self.unusable(suffix, format!("of {groups} groups"), &expected));
        }
        Ok(group)
    }

    /// Returns the blocks for codes with a zero point.
    fn with_zero(
        &self,
        suffix: &str,
        group: usize,
        scale: TensorType,
    ) -> Result<TensorType, ModelError> {
        // Their bits leave room for the zero point.
        if !matches!(scale, TensorType::F16 | TensorType::BF16) {
            return Err(ModelError::TensorType { name: self.name(suffix), found: scale.name() });
        }
        Ok(match group.is_multiple_of(128) {
            true => TensorType::I4_Z128,
            false => TensorType::I4_Z32,
        })
    }

    fn int4(&self, scale: TensorType, shape: &[u64]) -> Result<MatrixSource, ModelError> {
        let (rows, cols) = (self.rows, self.cols);
        self.refuse("weight_zero_point", "forebay knows symmetric integers")?;
        self.refuse("weight_g_idx", "forebay knows groups of adjacent columns")?;
        let group = self.group("weight_scale", shape.last().copied().unwrap_or(0))?;
        let ty = match scale {
            TensorType::BF16 if !group.is_multiple_of(128) => TensorType::I4_BF16,
            _ => self.with_zero("weight_scale", group, scale)?,
        };
        let extents = vec![
            self.tensor("weight_packed", &[TensorType::I32], &[rows, cols / 8])?,
            self.tensor("weight_scale", &[scale], &[rows, cols / group])?,
        ];
        Ok(self.source(Form::Int4 { group, scale }, ty, extents))
    }

    /// Returns group, type of scales and type of blocks, and the extents of scales and zero points.
    fn with_zeros(&self) -> Result<(usize, TensorType, TensorType, [Extent; 2]), ModelError> {
        let scales = self.tensors.find(&self.name("scales"))?;
        let group = self.group("scales", scales.shape.first().copied().unwrap_or(0))?;
        let ty = self.with_zero("scales", group, scales.ty)?;
        if !self.rows.is_multiple_of(8) {
            let rows = format!("of {} rows", self.rows);
            return Err(self.unusable("qzeros", rows, "rows must be multiples of 8"));
        }
        let groups = self.cols / group;
        let extents = [
            self.tensor("scales", &[scales.ty], &[groups, self.rows])?,
            self.tensor("qzeros", &[TensorType::I32], &[groups, self.rows / 8])?,
        ];
        Ok((group, scales.ty, ty, extents))
    }

    fn gptq(&self, zero_offset: u32) -> Result<MatrixSource, ModelError> {
        let (group, scale, ty, [scales, zeros]) = self.with_zeros()?;
        if self.tensors.optional(&self.name("g_idx")).is_some() {
            let order = self.tensor("g_idx", &[TensorType::I32], &[self.cols])?;
            if !self.tensors.counts_groups(order, group)? {
                let expected =
                    "forebay knows groups of adjacent columns; convert the model to GGUF";
                return Err(self.unusable("g_idx", "an order of columns".into(), expected));
            }
        }
        let codes = self.tensor("qweight", &[TensorType::I32], &[self.cols / 8, self.rows])?;
        let form = Form::Gptq { group, scale, zero_offset };
        Ok(self.source(form, ty, vec![codes, scales, zeros]))
    }

    fn awq(&self) -> Result<MatrixSource, ModelError> {
        let (group, scale, ty, [scales, zeros]) = self.with_zeros()?;
        let codes = self.tensor("qweight", &[TensorType::I32], &[self.cols, self.rows / 8])?;
        Ok(self.source(Form::Awq { group, scale }, ty, vec![codes, scales, zeros]))
    }
}

/// Adds a quantised matrix of every expert to the experts' blocks. Returns it as a part of them.
///
/// # Errors
/// Returns an error if the tensors do not fit, or if the experts' matrices differ.
pub fn experts(
    tensors: &Tensors<'_>,
    name_of: &dyn Fn(usize) -> String,
    blocks: &mut [Block],
    rows: usize,
    cols: usize,
) -> Result<PartMatrix, ModelError> {
    let mut first: Option<PartMatrix> = None;
    for (expert, block) in blocks.iter_mut().enumerate() {
        let name = name_of(expert);
        let matrix = tensors.source(&name, rows, cols)?.push(block);
        let first = *first.get_or_insert(matrix);
        if matrix.ty != first.ty {
            return Err(ModelError::TensorType { name, found: matrix.ty.name() });
        }
    }
    first.ok_or_else(|| ModelError::MissingTensor { name: name_of(0), family: tensors.family() })
}

/// Adds both matrix stacks of latent attention, made from a quantised `kv_b_proj` `[heads * (plain + value), rank]`, to
/// the dense block.
///
/// # Errors
/// Returns an error if the tensors do not fit, or if a block of the transposed stack would need several scales.
pub fn heads(
    tensors: &Tensors<'_>,
    dense: &mut Block,
    name: &str,
    heads: usize,
    latent: &Latent,
) -> Result<(HeadMatrices, HeadMatrices), ModelError> {
    let Latent { rank, plain, value, .. } = *latent;
    let source = tensors.source(name, heads * (plain + value), rank)?;
    let unknown = |expected: &str| ModelError::BadValue {
        key: name.into(),
        value: "quantised".into(),
        expected: expected.into(),
    };
    let Some(Step::Quantized { of: of @ Quantized { form: Form::Fp8 { scales }, .. }, .. }) =
        source.step
    else {
        return Err(unknown(
            "forebay knows this matrix in FP8 and unquantised; convert the model to GGUF",
        ));
    };
    let fits = |block: usize| {
        let shared = match scales {
            Scales::One(_) => true,
            Scales::Tiles { rows, .. } => {
                rows.is_multiple_of(block) && (plain + value).is_multiple_of(block)
            }
        };
        shared && plain.is_multiple_of(block)
    };
    let transposed = match (fits(128), fits(32)) {
        (true, _) => TensorType::F8_B128,
        (_, true) => TensorType::F8_B32,
        _ => {
            return Err(unknown(
                "forebay knows it with scales for tiles of 32 rows or more; convert the model to GGUF",
            ));
        }
    };
    let ty = of.ty;
    let step = Step::QuantizedHeads { first: 0, of, transposed, heads, plain };
    let bytes = [0, 1].map(|part| step.part_bytes(part) / heads.max(1));
    let part = dense.push_quantized(&source.extents, step);
    let stack = |matrix, bytes| HeadMatrices { matrix, bytes, heads };
    let keys = PartMatrix { part, ty: transposed, rows: rank, cols: plain };
    let values = PartMatrix { part: part + 1, ty, rows: value, cols: rank };
    Ok((stack(keys, bytes[0]), stack(values, bytes[1])))
}
