//! Matrices of quantised Hugging Face folders: tensors of codes, scales and zero points that blocks join when they are
//! read (`forebay-format`'s `quantized`).

use std::ops::Range;

use forebay_format::quantized::{Form, Quantized, Scales, are_halves, is_scale};
use forebay_format::{Block, Extent, Step, TensorInfo, TensorType};

use super::parts::{HeadMatrices, PartMatrix};
use super::tensors::{PACKED, Tensors, expect_contiguous, expect_lengths, expect_type};
use crate::ModelError;
use crate::arch::{Latent, Method, Quantization};

mod nf4;

/// A matrix, the extents that hold it, and the step that makes its part of a block of them. Without a step, the only
/// extent is the part.
pub struct MatrixSource {
    pub matrix: PartMatrix,
    pub extents: Vec<Extent>,
    pub step: Option<Step>,
}

impl MatrixSource {
    /// Returns the fewest rows whose bytes are contiguous in every extent, or `None` if an extent holds a row in several
    /// pieces.
    pub fn rows_apart(&self) -> Option<usize> {
        match &self.step {
            None => Some(1),
            Some(Step::Quantized { of, .. }) => of.rows_apart(),
            Some(Step::Mxfp4 { turns: 1, .. }) => Some(1),
            Some(_) => None,
        }
    }

    /// Returns some of the rows as a matrix of their own.
    ///
    /// # Panics
    /// Panics if the rows are not all, and are not multiples of [`MatrixSource::rows_apart`].
    pub fn of_rows(&self, rows: Range<usize>) -> MatrixSource {
        let all = self.matrix.rows;
        if rows == (0..all) {
            let MatrixSource { matrix, ref extents, ref step } = *self;
            return MatrixSource { matrix, extents: extents.clone(), step: step.clone() };
        }
        let apart = self.rows_apart().expect("all rows are taken where they are not contiguous");
        // Every extent but the first has an entry for so many rows.
        let slice = |(index, extent): (usize, &Extent)| {
            let high = if index == 0 { 1 } else { apart };
            let bytes = extent.length / all.div_ceil(high) as u64;
            let (first, end) = (rows.start / high, rows.end.div_ceil(high));
            assert!(rows.start.is_multiple_of(high), "rows begin with an entry");
            let slice = extent.slice(first as u64 * bytes, (end - first) as u64 * bytes);
            slice.expect("rows of the extent")
        };
        let extents = self.extents.iter().enumerate().map(slice).collect();
        let step = self.step.clone().map(|step| match step {
            Step::Quantized { first, of } => {
                Step::Quantized { first, of: Quantized { rows: rows.len(), ..of } }
            }
            Step::Mxfp4 { blocks, scales, row_blocks, turns, .. } => {
                Step::Mxfp4 { blocks, scales, rows: rows.len(), row_blocks, turns }
            }
            other => unreachable!("the rows of {other:?} are not contiguous"),
        });
        MatrixSource { matrix: PartMatrix { rows: rows.len(), ..self.matrix }, extents, step }
    }

    /// Returns the same matrix with elements of F32 if it has integers of 8 bits.
    fn widened(mut self) -> MatrixSource {
        if let Some(Step::Quantized { of, .. }) = &mut self.step
            && matches!(of.form, Form::Int8 { .. })
        {
            of.ty = TensorType::F32;
            self.matrix.ty = TensorType::F32;
        }
        self
    }

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
        let is_nf4 = self.quantization().is_some_and(|how| how.method == Method::Nf4);
        let is_code = |tensor: &TensorInfo| match tensor.ty {
            TensorType::U8 if is_nf4 => true,
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
            Some(Method::Gptq { zero_offset, is_ordered }) => stored.gptq(zero_offset, is_ordered),
            Some(Method::Awq) => stored.awq(),
            Some(Method::AwqRows { group }) => stored.awq_rows(group),
            Some(Method::Nf4) => stored.nf4(),
            _ if self.is_packed(name) => stored.packed(),
            _ => match self.optional(name).map(|tensor| tensor.ty) {
                Some(TensorType::F8_E4M3) => stored.fp8(self.quantization()),
                Some(TensorType::I8) if method == Some(Method::CompressedTensors) => {
                    let scale = self.find(&stored.name("weight_scale"))?;
                    stored.int8("weight", TensorType::I8, scale)
                }
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

    /// NVFP4, MXFP4 or integers of 4 or 8 bits as compressed-tensors writes them.
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
            (TensorType::I32, _) if codes.shape.last() == Some(&(self.cols as u64 / 4)) => {
                self.int8("weight_packed", TensorType::I32, scales)
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

    /// Integers of 8 bits with their own sign (I8), or four in a word with the zero point 128 (I32).
    fn int8(
        &self,
        suffix: &str,
        codes: TensorType,
        scales: &TensorInfo,
    ) -> Result<MatrixSource, ModelError> {
        let (rows, cols, scale) = (self.rows, self.cols, scales.ty);
        self.refuse("weight_zero_point", "forebay knows symmetric integers")?;
        self.refuse("weight_g_idx", "forebay knows groups of adjacent columns")?;
        if !matches!(scale, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
            return Err(ModelError::TensorType { name: scales.name.clone(), found: scale.name() });
        }
        let groups = usize::try_from(scales.shape.last().copied().unwrap_or(0)).unwrap_or(0);
        let group = cols.checked_div(groups).unwrap_or(0);
        // Scales of single columns would take more bytes than their weights.
        if group < 2 || group * groups != cols {
            let expected = format!("groups of 2 columns or more must make rows of {cols}");
            return Err(self.unusable("weight_scale", format!("of {groups} groups"), &expected));
        }
        self.expect_columns(suffix, codes.block_bytes())?;
        let extents = vec![
            self.tensor(suffix, &[codes], &[rows, cols / codes.block_bytes()])?,
            self.tensor("weight_scale", &[scale], &[rows, groups])?,
        ];
        let zero = if codes == TensorType::I32 { 128 } else { 0 };
        // Blocks take at least the bytes that are read.
        let fits = group.is_multiple_of(32) && (scale != TensorType::F32 || group >= 64);
        let ty = match fits && are_halves(scale, &self.tensors.bytes(extents[1])?) {
            true => TensorType::Q8_0,
            false => TensorType::F32,
        };
        Ok(self.source(Form::Int8 { group, scale, zero }, ty, extents))
    }

    /// Returns group, type of scales and type of blocks, and the extents of scales and zero points.
    fn with_zeros(&self) -> Result<(usize, TensorType, TensorType, [Extent; 2]), ModelError> {
        let scales = self.tensors.find(&self.name("scales"))?;
        let group = self.group("scales", scales.shape.first().copied().unwrap_or(0))?;
        let ty = self.with_zero("scales", group, scales.ty)?;
        Ok((group, scales.ty, ty, self.scales_and_zeros(self.cols / group)?))
    }

    /// Returns the extents of the scales and of the zero points of `groups` groups of columns.
    fn scales_and_zeros(&self, groups: usize) -> Result<[Extent; 2], ModelError> {
        if !self.rows.is_multiple_of(8) {
            let rows = format!("of {} rows", self.rows);
            return Err(self.unusable("qzeros", rows, "rows must be multiples of 8"));
        }
        let types = [TensorType::F32, TensorType::F16, TensorType::BF16];
        Ok([
            self.tensor("scales", &types, &[groups, self.rows])?,
            self.tensor("qzeros", &[TensorType::I32], &[groups, self.rows / 8])?,
        ])
    }

    /// GPTQ. Columns of a group are adjacent, or `g_idx` has the group of every column.
    fn gptq(&self, zero_offset: u32, is_ordered: bool) -> Result<MatrixSource, ModelError> {
        let (rows, cols) = (self.rows, self.cols);
        self.expect_columns("qweight", 8)?;
        if is_ordered {
            self.tensors.find(&self.name("g_idx"))?;
        }
        let codes = self.tensor("qweight", &[TensorType::I32], &[cols / 8, rows])?;
        if let Some(order) = self.tensors.optional(&self.name("g_idx")) {
            let groups_of = self.tensors.integers(&order.name, &[cols], &[TensorType::I32])?;
            let scales = self.tensors.find(&self.name("scales"))?;
            let groups = usize::try_from(scales.shape.first().copied().unwrap_or(0)).unwrap_or(0);
            let adjacent = cols.checked_div(groups).filter(|group| group * groups == cols);
            let is_adjacent = adjacent.is_some_and(|group| {
                groups_of.iter().enumerate().all(|(col, of)| *of == (col / group) as i64)
            });
            if !is_adjacent {
                if let Some(wrong) = groups_of.iter().find(|of| !(0..groups as i64).contains(*of)) {
                    let expected = format!("the scales are of {groups} groups");
                    return Err(self.unusable("g_idx", format!("group {wrong}"), &expected));
                }
                let scale = scales.ty;
                let [scales, zeros] = self.scales_and_zeros(groups)?;
                let form = Form::GptqOrdered { groups, scale, zero_offset };
                let extents = vec![codes, scales, zeros, order.extent];
                return Ok(self.source(form, TensorType::F32, extents));
            }
        }
        let (group, scale, ty, [scales, zeros]) = self.with_zeros()?;
        let form = Form::Gptq { group, scale, zero_offset };
        Ok(self.source(form, ty, vec![codes, scales, zeros]))
    }

    fn awq(&self) -> Result<MatrixSource, ModelError> {
        let (group, scale, ty, [scales, zeros]) = self.with_zeros()?;
        let codes = self.tensor("qweight", &[TensorType::I32], &[self.cols, self.rows / 8])?;
        Ok(self.source(Form::Awq { group, scale }, ty, vec![codes, scales, zeros]))
    }

    /// AWQ by rows. Rows of scales and zero points have more places than groups.
    fn awq_rows(&self, group: usize) -> Result<MatrixSource, ModelError> {
        let (rows, cols) = (self.rows, self.cols);
        self.expect_columns("qweight", 8)?;
        self.expect_columns("scales", group)?;
        let scale = self.tensors.find(&self.name("scales"))?.ty;
        let zeros = self.tensors.find(&self.name("qzeros"))?;
        let width = usize::try_from(zeros.shape.last().copied().unwrap_or(0)).unwrap_or(0);
        if width > cols || 8 * width < cols / group {
            let expected = format!("rows have {} groups", cols / group);
            return Err(self.unusable("qzeros", format!("of {width} words in a row"), &expected));
        }
        let types = [TensorType::F16, TensorType::BF16];
        let extents = vec![
            self.tensor("qweight", &[TensorType::I32], &[rows, cols / 8])?,
            self.tensor("scales", &types, &[rows, 8 * width])?,
            self.tensor("qzeros", &[TensorType::I32], &[rows, width])?,
        ];
        // Blocks take at least the bytes that are read.
        let read = cols / 2 + 20 * width;
        let has_room = |ty: &TensorType| {
            let bytes = ty.row_bytes(cols as u64).unwrap_or(0);
            group.is_multiple_of(ty.block_elements()) && bytes >= read as u64
        };
        let known = [TensorType::I4_Z128, TensorType::I4_Z32, TensorType::F32];
        let Some(ty) = known.into_iter().find(has_room) else {
            let expected = "there are fewer places than columns";
            return Err(self.unusable("qzeros", format!("of {width} words in a row"), expected));
        };
        Ok(self.source(Form::AwqRows { group, scale, width }, ty, extents))
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
    let mut sources = (0..blocks.len())
        .map(|expert| tensors.source(&name_of(expert), rows, cols))
        .collect::<Result<Vec<MatrixSource>, ModelError>>()?;
    // Kernels need one type for all experts.
    if sources.iter().any(|source| source.matrix.ty == TensorType::F32) {
        sources = sources.into_iter().map(MatrixSource::widened).collect();
    }
    let mut first: Option<PartMatrix> = None;
    for (expert, (block, source)) in blocks.iter_mut().zip(sources).enumerate() {
        let name = name_of(expert);
        let matrix = source.push(block);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_matrix_have_their_own_codes_and_scales() {
        let (rows, cols) = (40, 64);
        let extent = |offset, length| Extent { file: forebay_format::FileIndex(0), offset, length };
        let source = |form, scale_bytes| {
            let of = Quantized { form, ty: TensorType::F8_B32, rows, cols };
            let matrix = PartMatrix { part: 0, ty: of.ty, rows, cols };
            let extents = vec![extent(1000, 40 * 64), extent(5000, scale_bytes)];
            MatrixSource { matrix, extents, step: Some(Step::Quantized { first: 0, of }) }
        };
        // Two scales for every 16 rows: three rows of scales.
        let scales = Scales::Tiles { ty: TensorType::F32, rows: 16, cols: 32 };
        let tiles = source(Form::Fp8 { scales }, 3 * 2 * 4);
        assert_eq!(tiles.rows_apart(), Some(16));
        let last = tiles.of_rows(32..40);
        assert_eq!(last.extents, [extent(1000 + 32 * 64, 8 * 64), extent(5016, 8)]);
        let Some(Step::Quantized { of, .. }) = &last.step else { panic!("no step") };
        assert_eq!((last.matrix.rows, of.rows), (8, 8));
        assert_eq!(tiles.of_rows(0..16).extents, [extent(1000, 16 * 64), extent(5000, 8)]);
        assert!(std::panic::catch_unwind(|| tiles.of_rows(8..16)).is_err());
        let words = Form::Int8 { group: 64, scale: TensorType::BF16, zero: 0 };
        let rows_of = source(words, 40 * 2).of_rows(3..5);
        assert_eq!(rows_of.extents, [extent(1000 + 3 * 64, 2 * 64), extent(5006, 4)]);
        let scale = TensorType::F16;
        let turned = source(Form::Gptq { group: 32, scale, zero_offset: 0 }, 80);
        assert_eq!(turned.rows_apart(), None);
        assert_eq!(turned.of_rows(0..40).extents, turned.extents);
    }

    #[test]
    fn integers_of_8_bits_are_widened_and_nothing_else() {
        let source = |form| {
            let of = Quantized { form, ty: TensorType::Q8_0, rows: 2, cols: 32 };
            let matrix = PartMatrix { part: 0, ty: of.ty, rows: 2, cols: 32 };
            MatrixSource { matrix, extents: vec![], step: Some(Step::Quantized { first: 0, of }) }
        };
        let scale = TensorType::BF16;
        let wide = source(Form::Int8 { group: 32, scale, zero: 0 }).widened();
        let Some(Step::Quantized { of, .. }) = wide.step else { panic!("no step") };
        assert_eq!((wide.matrix.ty, of.ty), (TensorType::F32, TensorType::F32));
        let other = source(Form::Awq { group: 32, scale }).widened();
        assert_eq!(other.matrix.ty, TensorType::Q8_0);
    }
}
