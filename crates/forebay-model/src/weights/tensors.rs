//! Looks up tensors and checks them against the architecture.

use forebay_format::{Catalog, Extent, TensorInfo, TensorType, dequantize};
use forebay_store::FileSet;

use super::parts::PartMatrix;
use crate::ModelError;
use crate::arch::{Names, Quantization};

/// Ends of the names of packed codes, in place of `.weight`.
pub(super) const PACKED: [&str; 2] = [".weight_packed", ".qweight"];

pub struct Tensors<'a> {
    catalog: &'a Catalog,
    files: &'a FileSet,
    names: Names,
    quantization: Option<Quantization>,
    /// True if some matrix is in packed codes.
    has_packed: bool,
    vector_bytes: u64,
}

impl<'a> Tensors<'a> {
    /// Describes the tensors of a catalog.
    ///
    /// # Errors
    /// Returns an error if they are quantised in a form that forebay does not know.
    pub fn new(catalog: &'a Catalog, files: &'a FileSet, names: Names) -> Result<Self, ModelError> {
        let quantization = Quantization::of_catalog(catalog)?;
        let is_packed = |of: &TensorInfo| PACKED.iter().any(|end| of.name.ends_with(end));
        let has_packed = catalog.tensors().iter().any(is_packed);
        Ok(Tensors { catalog, files, names, quantization, has_packed, vector_bytes: 0 })
    }

    /// Returns the name of the model's family.
    pub(super) fn family(&self) -> &'static str {
        self.names.family()
    }

    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// Returns true if some matrix is in packed codes.
    pub(super) fn has_packed(&self) -> bool {
        self.has_packed
    }

    /// Returns how the folder stores quantised weights, if it does.
    pub fn quantization(&self) -> Option<Quantization> {
        self.quantization
    }

    /// Returns the bytes in memory of the vectors read so far.
    pub fn vector_bytes(&self) -> u64 {
        self.vector_bytes
    }

    pub(super) fn find(&self, name: &str) -> Result<&'a TensorInfo, ModelError> {
        let family = self.names.family();
        if self.is_packed(name) {
            return Err(quantised_here(name));
        }
        self.catalog
            .tensor(name)
            .ok_or_else(|| ModelError::MissingTensor { name: name.into(), family })
    }

    /// Returns a tensor whose elements are weights as they are.
    fn find_plain(&self, name: &str) -> Result<&'a TensorInfo, ModelError> {
        let tensor = self.find(name)?;
        match self.is_quantized(name) {
            true => Err(quantised_here(name)),
            false => Ok(tensor),
        }
    }

    /// Reads the only element of a tensor.
    pub(super) fn scalar(&self, name: &str) -> Result<f32, ModelError> {
        let tensor = self.find(name)?;
        if tensor.elements() != 1 {
            return Err(ModelError::TensorShape {
                name: name.into(),
                found: tensor.shape.clone(),
                expected: vec![1],
            });
        }
        Ok(self.values(tensor)?[0])
    }

    /// Reads whole numbers. `types` has the types that they may have: [`TensorType::I32`] or [`TensorType::I64`].
    pub(super) fn integers(
        &self,
        name: &str,
        shape: &[usize],
        types: &[TensorType],
    ) -> Result<Vec<i64>, ModelError> {
        let tensor = self.find(name)?;
        expect_lengths(tensor, shape)?;
        expect_type(tensor, types)?;
        expect_contiguous(tensor)?;
        let bytes = self.bytes(tensor.extent)?;
        match tensor.ty {
            TensorType::I64 => {
                Ok(bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
            }
            TensorType::I32 => {
                let numbers = bytes.as_chunks().0.iter();
                Ok(numbers.map(|bytes| i64::from(i32::from_le_bytes(*bytes))).collect())
            }
            other => unreachable!("{} holds no integers", other.name()),
        }
    }

    /// Returns a tensor that a model may lack.
    pub fn optional(&self, name: &str) -> Option<&'a TensorInfo> {
        self.catalog.tensor(name)
    }

    /// Returns a matrix `[rows, cols]`, as part 0, and its extent.
    pub fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<(PartMatrix, Extent), ModelError> {
        let tensor = self.find_plain(name)?;
        expect_shape(tensor, &[rows as u64, cols as u64])?;
        expect_matrix_type(tensor)?;
        expect_contiguous(tensor)?;
        Ok((PartMatrix { part: 0, ty: tensor.ty, rows, cols }, tensor.extent))
    }

    /// Returns one of `count` matrices `[count, rows, cols]` stored consecutively, and the extent of all.
    pub fn stack(
        &self,
        name: &str,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<(PartMatrix, Extent), ModelError> {
        let tensor = self.find_plain(name)?;
        expect_shape(tensor, &[count as u64, rows as u64, cols as u64])?;
        expect_matrix_type(tensor)?;
        expect_contiguous(tensor)?;
        Ok((PartMatrix { part: 0, ty: tensor.ty, rows, cols }, tensor.extent))
    }

    /// Returns one matrix per expert, from a stacked tensor `[experts, rows, cols]` or from one tensor per expert.
    pub fn expert_matrices(
        &self,
        name_of: &dyn Fn(usize) -> String,
        experts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<(PartMatrix, Vec<Extent>), ModelError> {
        let first = self.find_plain(&name_of(0))?;
        expect_matrix_type(first)?;
        let matrix = PartMatrix { part: 0, ty: first.ty, rows, cols };
        if first.shape.len() == 3 {
            expect_shape(first, &[experts as u64, rows as u64, cols as u64])?;
            let slices = (0..experts as u64).map(|expert| first.outer_slice(expert, 1));
            let slices: Option<Vec<Extent>> = slices.collect();
            let uneven =
                || ModelError::TensorType { name: first.name.clone(), found: first.ty.name() };
            return Ok((matrix, slices.ok_or_else(uneven)?));
        }
        self.alike(name_of, experts, rows, cols)
    }

    /// Returns `count` matrices of one type, each in a tensor `[rows, cols]`.
    ///
    /// # Panics
    /// Panics if `count` is 0.
    pub fn alike(
        &self,
        name_of: &dyn Fn(usize) -> String,
        count: usize,
        rows: usize,
        cols: usize,
    ) -> Result<(PartMatrix, Vec<Extent>), ModelError> {
        let mut extents = Vec::with_capacity(count);
        let mut first = None;
        for name in (0..count).map(name_of) {
            let (matrix, extent) = self.matrix(&name, rows, cols)?;
            let PartMatrix { ty, .. } = *first.get_or_insert(matrix);
            if matrix.ty != ty {
                return Err(ModelError::TensorType { name, found: matrix.ty.name() });
            }
            extents.push(extent);
        }
        Ok((first.expect("there is at least one"), extents))
    }

    /// Returns the extent of each entry in the outermost dimension of a tensor of bytes.
    pub fn byte_stack(&self, name: &str, shape: &[usize]) -> Result<Vec<Extent>, ModelError> {
        let tensor = self.find(name)?;
        expect_lengths(tensor, shape)?;
        expect_type(tensor, &[TensorType::U8])?;
        let wrong = || ModelError::TensorType { name: name.into(), found: tensor.ty.name() };
        let entries = 0..shape[0] as u64;
        entries.map(|entry| tensor.outer_slice(entry, 1).ok_or_else(wrong)).collect()
    }

    /// Reads a vector and widens it to f32. It may be stored with more dimensions, all but one of which are 1.
    pub fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>, ModelError> {
        let shape = &self.find(name)?.shape;
        let is_line = shape.iter().filter(|dim| **dim != 1).count() <= 1;
        let fits = is_line && shape.iter().product::<u64>() == length as u64;
        match fits {
            true => self.floats(name, &shape.clone()),
            false => self.floats(name, &[length as u64]),
        }
    }

    /// Returns a vector of zeros that is in no file.
    pub fn zeros(&mut self, length: usize) -> Vec<f32> {
        self.count_bytes(4 * length as u64);
        vec![0.0; length]
    }

    /// Returns the weights of a norm that has none in the file.
    pub fn ones(&mut self, length: usize) -> Vec<f32> {
        self.count_bytes(4 * length as u64);
        vec![1.0; length]
    }

    /// Reads a vector whose elements may have several dimensions.
    pub fn flat_vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.find(name)?;
        match tensor.elements() == length as u64 {
            true => self.floats(name, &tensor.shape),
            false => self.vector(name, length),
        }
    }

    /// Reads the weights of a convolution, one row of `width` for each channel. Hugging Face's tensors have a middle dimension
    /// of 1.
    pub fn convolution(
        &mut self,
        name: &str,
        channels: usize,
        width: usize,
    ) -> Result<Vec<f32>, ModelError> {
        let has_middle = self.find(name)?.shape.len() == 3;
        let (channels, width) = (channels as u64, width as u64);
        match has_middle {
            true => self.floats(name, &[channels, 1, width]),
            false => self.floats(name, &[channels, width]),
        }
    }

    /// Reads `count` vectors `[count, length]` and widens them to f32.
    pub fn rows(
        &mut self,
        name: &str,
        count: usize,
        length: usize,
    ) -> Result<Vec<f32>, ModelError> {
        self.floats(name, &[count as u64, length as u64])
    }

    /// Reads `count` matrices `[count, rows, cols]` and widens them to f32.
    pub fn matrices(
        &mut self,
        name: &str,
        count: usize,
        [rows, cols]: [usize; 2],
    ) -> Result<Vec<f32>, ModelError> {
        self.floats(name, &[count as u64, rows as u64, cols as u64])
    }

    /// Reads the weights of a norm, with the family's offset added.
    pub fn norm(&mut self, name: &str, length: usize) -> Result<Vec<f32>, ModelError> {
        let offset = self.names.norm_offset();
        let mut values = self.vector(name, length)?;
        values.iter_mut().for_each(|value| *value += offset);
        Ok(values)
    }

    fn floats(&mut self, name: &str, shape: &[u64]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.find(name)?;
        expect_shape(tensor, shape)?;
        expect_contiguous(tensor)?;
        let values = self.values(tensor)?;
        self.vector_bytes += 4 * values.len() as u64;
        Ok(values)
    }

    fn values(&self, tensor: &TensorInfo) -> Result<Vec<f32>, ModelError> {
        let bytes = self.bytes(tensor.extent)?;
        let mut values = vec![0.0; tensor.elements() as usize];
        dequantize(tensor.ty, &bytes, &mut values)?;
        match values.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(ModelError::NotFinite { name: tensor.name.clone(), index }),
            None => Ok(values),
        }
    }

    /// Reads an extent.
    pub(super) fn bytes(&self, extent: Extent) -> Result<Vec<u8>, ModelError> {
        let mut bytes = vec![0; extent.length as usize];
        self.files.read_exact(extent, &mut bytes)?;
        Ok(bytes)
    }

    /// Notes that so many more bytes are in memory.
    pub(super) fn count_bytes(&mut self, bytes: u64) {
        self.vector_bytes += bytes;
    }

    /// Reads a vector that a model may lack.
    pub fn optional_vector(
        &mut self,
        name: &str,
        length: usize,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        match self.catalog.tensor(name) {
            Some(_) => self.vector(name, length).map(Some),
            None => Ok(None),
        }
    }
}

fn quantised_here(name: &str) -> ModelError {
    ModelError::BadValue {
        key: name.into(),
        value: "quantised".into(),
        expected: "forebay knows this tensor unquantised; convert the model to GGUF".into(),
    }
}

fn expect_shape(tensor: &TensorInfo, expected: &[u64]) -> Result<(), ModelError> {
    if tensor.shape == expected {
        return Ok(());
    }
    Err(ModelError::TensorShape {
        name: tensor.name.clone(),
        found: tensor.shape.clone(),
        expected: expected.to_vec(),
    })
}

pub(super) fn expect_lengths(tensor: &TensorInfo, expected: &[usize]) -> Result<(), ModelError> {
    let expected: Vec<u64> = expected.iter().map(|&length| length as u64).collect();
    expect_shape(tensor, &expected)
}

pub(super) fn expect_type(tensor: &TensorInfo, known: &[TensorType]) -> Result<(), ModelError> {
    match known.contains(&tensor.ty) {
        true => Ok(()),
        false => Err(ModelError::TensorType { name: tensor.name.clone(), found: tensor.ty.name() }),
    }
}

/// Checks that a tensor is contiguous. Only stacks of experts may consist of several pieces.
pub(super) fn expect_contiguous(tensor: &TensorInfo) -> Result<(), ModelError> {
    match tensor.is_contiguous() {
        true => Ok(()),
        false => Err(ModelError::TensorInPieces { name: tensor.name.clone() }),
    }
}

fn expect_matrix_type(tensor: &TensorInfo) -> Result<(), ModelError> {
    let integer = matches!(
        tensor.ty,
        TensorType::U8
            | TensorType::I8
            | TensorType::I16
            | TensorType::I32
            | TensorType::I64
            | TensorType::F64
    );
    if integer || tensor.ty.row_bytes(*tensor.shape.last().unwrap_or(&0)).is_none() {
        return Err(ModelError::TensorType { name: tensor.name.clone(), found: tensor.ty.name() });
    }
    Ok(())
}
