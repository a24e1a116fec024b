//! Products with dense matrices and with experts: chooses the kernels and converts activations to the form that they
//! take.

use std::cell::Cell;

use forebay_cuda::{
    AddressTable, Converted, DECODE_ROWS, DeviceMatmul, DeviceMatrix, DevicePtr, ExpertPairs,
    ExpertPart, ExpertTable, Gate, GateBiases, Gpu, MatmulInput, MatmulWeights, MatvecInput,
    NarrowActivations, NarrowForm, Pairing, RoundedActivations, TiledActivations, narrow_form,
    takes_rounded, takes_tiles,
};
use forebay_format::TensorType;
use forebay_ops::{Gating, RowKind};

use crate::ModelError;
use crate::backend::Step;
use crate::weights::PartMatrix;

/// Rows of activations, one for each token.
#[derive(Clone, Copy)]
pub struct Rows {
    /// Kind of all rows, which selects the kernels.
    pub kind: RowKind,
    pub count: usize,
}

impl Rows {
    /// Returns the rows of a step.
    pub fn of(step: &Step<'_>) -> Rows {
        Rows { kind: step.kind(), count: step.count }
    }
}

/// A matrix on the device and the address of its product.
#[derive(Clone, Copy)]
pub struct Product {
    pub matrix: PartMatrix,
    pub data: DevicePtr<u8>,
    pub out: DevicePtr<f32>,
}

/// One layer's experts and their entries: the operands of [`Products::experts`].
#[derive(Clone, Copy)]
pub struct ExpertEntries {
    pub slots: AddressTable,
    pub experts: usize,
    pub rows: Rows,
    /// Number of experts of each row.
    pub used: usize,
    /// Chosen experts `[rows, used]`.
    pub ids: DevicePtr<u32>,
    /// For the mat-vec kernels, the order in which pairs of a row and an expert are computed. Null for ascending order.
    pub order: DevicePtr<u32>,
    /// Index of each expert's first entry. Entries are pairs of a row and an expert, sorted by expert.
    pub starts: DevicePtr<u32>,
    /// Row of each entry.
    pub pair_tokens: DevicePtr<u32>,
}

impl ExpertEntries {
    /// Returns the number of pairs of a row and an expert.
    fn count(&self) -> usize {
        self.rows.count * self.used
    }

    /// Returns the pairs for the mat-vec kernels.
    fn pairs(&self, row: EntryRow) -> ExpertPairs {
        let per_row = if row == EntryRow::Token { self.used } else { 1 };
        ExpertPairs { ids: self.ids, order: self.order, count: self.count(), per_row }
    }
}

/// One part of every expert and the address of its products.
#[derive(Clone, Copy)]
pub struct ExpertProduct {
    pub matrix: PartMatrix,
    /// Offset of the part in an expert's slot.
    pub offset: u64,
    pub out: DevicePtr<f32>,
}

/// Row of the activations that an entry reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum EntryRow {
    /// The row of the entry's token.
    Token,
    /// The entry's own row.
    Own,
}

/// Buffers for rounded activations, and the choice of kernels. The choice depends on the kind of the rows and never on
/// their number, so a row's bits do not depend on the rows beside it.
pub struct Products {
    /// True if all products are computed in f32.
    pub exact: bool,
    rounded: RoundedActivations,
    narrow: NarrowActivations,
    /// Address of the activations whose rounded values are in `rounded`; `None` if the activations have changed.
    rounded_of: Cell<Option<u64>>,
    /// Rounded activations of decode rows in the order of tensor cores, in the memory of `narrow`, which only prompts need.
    tiled: TiledActivations,
    /// Address of the activations that are in `tiled`; `None` if they have changed.
    tiled_of: Cell<Option<u64>>,
    /// Address of the activations whose halves are in `narrow`; `None` if the activations have changed.
    halves_of: Cell<Option<u64>>,
    /// True if any matrix takes rounded activations.
    rounds: bool,
    /// True if any matrix takes halves, [`NarrowForm::Half`].
    takes_halves: bool,
}

impl Products {
    /// Creates the state for a model with matrices of these types.
    pub fn new(
        exact: bool,
        types: &[TensorType],
        rounded: RoundedActivations,
        narrow: NarrowActivations,
    ) -> Products {
        let takes_halves = |&ty: &TensorType| narrow_form(ty, 256) == Some(NarrowForm::Half);
        Products {
            exact,
            rounded,
            narrow,
            rounded_of: Cell::new(None),
            tiled: TiledActivations { codes: narrow.high.cast(), scales: narrow.low.cast() },
            tiled_of: Cell::new(None),
            halves_of: Cell::new(None),
            rounds: types.iter().copied().any(takes_rounded),
            takes_halves: !exact && types.iter().any(takes_halves),
        }
    }

    /// Begins a pass: another one may have used the memory since the last.
    pub fn begin(&self) {
        self.halves_of.set(None);
        self.tiled_of.set(None);
    }

    /// Notes that `x [rows, cols]` gets new values. Returns the form in which the kernel that writes them must write them
    /// too, and where.
    ///
    /// # Panics
    /// Panics if there are more than [`DECODE_ROWS`] decode rows.
    pub fn converted_too(&self, x: DevicePtr<f32>, rows: Rows, cols: usize) -> Option<Converted> {
        let rounded = self.rounded_too(x, rows, cols).map(Converted::Rounded);
        rounded.or_else(|| self.halves_too(x, rows, cols).map(Converted::Halves))
    }

    /// Notes that `x` gets new values. If the kernel that writes them must also write halves, returns where.
    fn halves_too(&self, x: DevicePtr<f32>, rows: Rows, cols: usize) -> Option<NarrowActivations> {
        let is_prompt = rows.kind == RowKind::Prompt;
        let wanted = self.takes_halves && is_prompt && cols.is_multiple_of(8);
        self.changed(x);
        if wanted {
            self.halves_of.set(Some(x.address()));
        }
        wanted.then_some(self.narrow)
    }

    /// Notes that `x [rows, cols]` gets new values. If the kernel that writes them must also write them rounded, returns
    /// where.
    ///
    /// # Panics
    /// Panics if there are more than [`DECODE_ROWS`] decode rows.
    pub fn rounded_too(
        &self,
        x: DevicePtr<f32>,
        rows: Rows,
        cols: usize,
    ) -> Option<RoundedActivations> {
        let wanted = self.rounds && self.takes_matvec(rows.kind) && cols.is_multiple_of(32);
        assert!(!wanted || rows.count <= DECODE_ROWS, "{} decode rows", rows.count);
        self.changed(x);
        self.rounded_of.set(wanted.then_some(x.address()));
        wanted.then_some(self.rounded)
    }

    /// Notes that `x` got new values.
    pub fn changed(&self, x: DevicePtr<f32>) {
        for known in [&self.rounded_of, &self.tiled_of, &self.halves_of] {
            if known.get() == Some(x.address()) {
                known.set(None);
            }
        }
    }

    /// Returns true if rows of this kind use the mat-vec kernels.
    pub fn takes_matvec(&self, kind: RowKind) -> bool {
        !self.exact && kind == RowKind::Decode
    }

    /// Multiplies `x [rows, cols]` by up to four matrices with the same number of columns.
    pub fn dense(
        &self,
        gpu: &Gpu,
        x: DevicePtr<f32>,
        rows: Rows,
        products: &[Product],
    ) -> Result<(), ModelError> {
        let (tokens, cols) = (rows.count, products[0].matrix.cols);
        if self.takes_matvec(rows.kind) {
            self.round_for(gpu, x, tokens, cols, products.iter().map(|p| p.matrix.ty))?;
            for (ty, of_type) in by_type(products, |product| product.matrix.ty) {
                let mut matrices = [device_matrix(&products[0]); TOGETHER];
                let mut count = 0;
                for product in of_type {
                    matrices[count] = device_matrix(product);
                    count += 1;
                }
                let input = self.dense_input(gpu, ty, x, tokens, cols)?;
                gpu.matvec(ty, &matrices[..count], input, tokens, cols, Pairing::Separate)?;
            }
            return Ok(());
        }
        let mut form = None;
        for (ty, products) in by_type(products, |product| product.matrix.ty) {
            let x = self.prompt_input(gpu, ty, x, tokens, cols, &mut form)?;
            let job = |product: &Product| DeviceMatmul {
                ty,
                weights: MatmulWeights::Dense { data: product.data, tokens },
                rows: product.matrix.rows,
                cols,
                x,
                out: product.out,
            };
            multiply_together(gpu, products.map(job))?;
        }
        Ok(())
    }

    /// Computes `gate.out = gating(x * gate, x * up)` for `x [rows, cols]`. Without a gate, `up` is not read. `cut`, if given, makes
    /// the gates sparse first ([`Gpu::cut_rows`]).
    pub fn gated(
        &self,
        gpu: &Gpu,
        (gating, cut): (Gating, Option<f32>),
        x: DevicePtr<f32>,
        rows: Rows,
        [gate, up]: [Product; 2],
    ) -> Result<(), ModelError> {
        let (ty, cols) = (gate.matrix.ty, gate.matrix.cols);
        if !gating.has_gate() && self.takes_matvec(rows.kind) {
            self.round_for(gpu, x, rows.count, cols, [ty].into_iter())?;
            let input = self.dense_input(gpu, ty, x, rows.count, cols)?;
            let (matrices, pairing) = ([device_matrix(&gate)], Pairing::Activated(gating));
            gpu.matvec(ty, &matrices, input, rows.count, cols, pairing)?;
            self.changed(gate.out);
            return Ok(());
        }
        if self.takes_matvec(rows.kind) && ty == up.matrix.ty && cut.is_none() {
            self.round_for(gpu, x, rows.count, cols, [ty].into_iter())?;
            let matrices = [device_matrix(&gate), device_matrix(&up)];
            let input = self.dense_input(gpu, ty, x, rows.count, cols)?;
            gpu.matvec(ty, &matrices, input, rows.count, cols, Pairing::gated(gating))?;
            self.changed(gate.out);
            return Ok(());
        }
        let up = if gating.has_gate() { up } else { gate };
        self.dense(gpu, x, rows, &[gate, up][..1 + usize::from(gating.has_gate())])?;
        let width = gate.matrix.rows;
        if let Some(cut) = cut {
            gpu.cut_rows(gate.out, rows.count, width, cut)?;
        }
        let (gate, up, halves) = (gate.out, up.out, self.halves_too(gate.out, rows, width));
        let rows = rows.count;
        gpu.gate(&Gate { gate, up, out: gate, rows, width, gating, biases: None, halves })?;
        Ok(())
    }

    /// Computes [`Products::gated`] for every entry with its expert. The expert's biases are added before the gating.
    pub fn gated_experts(
        &self,
        gpu: &Gpu,
        gating: Gating,
        biases: Option<GateBiases>,
        x: DevicePtr<f32>,
        entries: &ExpertEntries,
        [gate, up]: [ExpertProduct; 2],
    ) -> Result<(), ModelError> {
        let ty = gate.matrix.ty;
        let up = if gating.has_gate() { up } else { gate };
        let matrices = 1 + usize::from(gating.has_gate());
        if self.takes_matvec(entries.rows.kind) && ty == up.matrix.ty {
            let cols = gate.matrix.cols;
            self.round_for(gpu, x, entries.rows.count, cols, [ty].into_iter())?;
            let table = ExpertTable { slots: entries.slots, rows: gate.matrix.rows };
            let parts = [gate, up].map(|part| ExpertPart { offset: part.offset, out: part.out });
            let input = self.decode_input(ty, x);
            let pairs = entries.pairs(EntryRow::Token);
            let pairing = match gating.has_gate() {
                true => Pairing::Gated { gating, biases },
                false => Pairing::Activated(gating),
            };
            gpu.matvec_experts(ty, table, &parts[..matrices], pairs, input, cols, pairing)?;
            self.changed(gate.out);
            return Ok(());
        }
        self.experts(gpu, x, entries, EntryRow::Token, &[gate, up][..matrices])?;
        let (width, rows) = (gate.matrix.rows, entries.count());
        let (gate, up) = (gate.out, up.out);
        let halves = self.halves_too(gate, Rows { count: rows, ..entries.rows }, width);
        gpu.gate(&Gate { gate, up, out: gate, rows, width, gating, biases, halves })?;
        Ok(())
    }

    /// Multiplies rows `[tokens, heads, cols]` of `x` by the matrix of their head. The output is
    /// `[tokens, heads, rows]`. For prompt rows, `rows` gives the row of each entry in the order of heads.
    pub fn heads(
        &self,
        gpu: &Gpu,
        x: DevicePtr<f32>,
        entries: &ExpertEntries,
        rows: DevicePtr<u32>,
        product: ExpertProduct,
    ) -> Result<(), ModelError> {
        if self.takes_matvec(entries.rows.kind) {
            return self.experts(gpu, x, entries, EntryRow::Own, &[product]);
        }
        let (ty, cols) = (product.matrix.ty, product.matrix.cols);
        let count = entries.count();
        gpu.matmul(&DeviceMatmul {
            ty,
            weights: MatmulWeights::Experts {
                slots: entries.slots,
                experts: entries.experts,
                offset: product.offset,
                starts: entries.starts,
                token_rows: rows,
                out_rows: rows,
                entries: count,
            },
            rows: product.matrix.rows,
            cols,
            x: self.prompt_input(gpu, ty, x, count, cols, &mut None)?,
            out: product.out,
        })?;
        Ok(())
    }

    /// Multiplies every entry's row of `x` by parts of its expert. Outputs for the mat-vec kernels are in the order of
    /// rows, others in the order of experts.
    pub fn experts(
        &self,
        gpu: &Gpu,
        x: DevicePtr<f32>,
        entries: &ExpertEntries,
        row: EntryRow,
        products: &[ExpertProduct],
    ) -> Result<(), ModelError> {
        let cols = products[0].matrix.cols;
        let pairs = entries.count();
        let x_rows = if row == EntryRow::Token { entries.rows.count } else { pairs };
        let types = products.iter().map(|product| product.matrix.ty);
        if self.takes_matvec(entries.rows.kind) {
            self.round_for(gpu, x, x_rows, cols, types)?;
            for product in products {
                let ty = product.matrix.ty;
                let table = ExpertTable { slots: entries.slots, rows: product.matrix.rows };
                let part = [ExpertPart { offset: product.offset, out: product.out }];
                let (input, pairs) = (self.decode_input(ty, x), entries.pairs(row));
                let pairing = Pairing::Separate;
                gpu.matvec_experts(ty, table, &part, pairs, input, cols, pairing)?;
            }
            return Ok(());
        }
        let token_rows =
            if row == EntryRow::Token { entries.pair_tokens } else { DevicePtr::null() };
        let mut form = None;
        for (ty, products) in by_type(products, |product| product.matrix.ty) {
            let x = self.prompt_input(gpu, ty, x, x_rows, cols, &mut form)?;
            let job = |product: &ExpertProduct| DeviceMatmul {
                ty,
                weights: MatmulWeights::Experts {
                    slots: entries.slots,
                    experts: entries.experts,
                    offset: product.offset,
                    starts: entries.starts,
                    token_rows,
                    out_rows: DevicePtr::null(),
                    entries: pairs,
                },
                rows: product.matrix.rows,
                cols,
                x,
                out: product.out,
            };
            multiply_together(gpu, products.map(job))?;
        }
        Ok(())
    }

    /// Rounds `x` if any of `types` takes rounded activations and `rounded` does not hold them yet.
    fn round_for(
        &self,
        gpu: &Gpu,
        x: DevicePtr<f32>,
        rows: usize,
        cols: usize,
        mut types: impl Iterator<Item = TensorType>,
    ) -> Result<(), ModelError> {
        if self.rounded_of.get() != Some(x.address()) && types.any(takes_rounded) {
            gpu.quantize_q8(x, self.rounded, rows, cols)?;
            self.rounded_of.set(Some(x.address()));
        }
        Ok(())
    }

    /// Returns rounded rows of `x` for a product with a dense matrix, in the order that it takes.
    fn dense_input(
        &self,
        gpu: &Gpu,
        ty: TensorType,
        x: DevicePtr<f32>,
        rows: usize,
        cols: usize,
    ) -> Result<MatvecInput, ModelError> {
        if !takes_tiles(ty, rows) {
            return Ok(self.decode_input(ty, x));
        }
        if self.tiled_of.get() != Some(x.address()) {
            gpu.tile_rounded(self.rounded, self.tiled, rows, cols)?;
            self.tiled_of.set(Some(x.address()));
        }
        Ok(MatvecInput::Tiled(self.tiled))
    }

    fn decode_input(&self, ty: TensorType, x: DevicePtr<f32>) -> MatvecInput {
        match takes_rounded(ty) {
            true => MatvecInput::Rounded(self.rounded),
            false => MatvecInput::Float(x),
        }
    }

    /// Returns `x` in the form that `ty` takes. `made` is the form that already exists.
    fn prompt_input(
        &self,
        gpu: &Gpu,
        ty: TensorType,
        x: DevicePtr<f32>,
        rows: usize,
        cols: usize,
        made: &mut Option<NarrowForm>,
    ) -> Result<MatmulInput, ModelError> {
        let form = if self.exact { None } else { narrow_form(ty, cols) };
        let Some(form) = form else { return Ok(MatmulInput::Float(x)) };
        let is_made = form == NarrowForm::Half && self.halves_of.get() == Some(x.address());
        if !is_made && *made != Some(form) {
            self.halves_of.set(None);
            gpu.narrow(form, x, self.narrow, rows, cols)?;
            *made = Some(form);
        }
        Ok(MatmulInput::Narrow(self.narrow))
    }
}

/// Most products of the same activations.
pub const TOGETHER: usize = 4;

/// Returns the types among `products`, each with its products.
fn by_type<T>(
    products: &[T],
    type_of: impl Fn(&T) -> TensorType + Copy,
) -> impl Iterator<Item = (TensorType, impl Iterator<Item = &T>)> {
    let is_first = move |index: usize| {
        let ty = type_of(&products[index]);
        products[..index].iter().all(|earlier| type_of(earlier) != ty)
    };
    (0..products.len()).filter(move |index| is_first(*index)).map(move |index| {
        let ty = type_of(&products[index]);
        (ty, products.iter().filter(move |product| type_of(product) == ty))
    })
}

/// Computes up to [`TOGETHER`] products of the same activations with weights of one type.
fn multiply_together(
    gpu: &Gpu,
    mut jobs: impl Iterator<Item = DeviceMatmul>,
) -> Result<(), ModelError> {
    let Some(first) = jobs.next() else { return Ok(()) };
    let (mut all, mut count) = ([first; TOGETHER], 1);
    for job in jobs {
        all[count] = job;
        count += 1;
    }
    Ok(gpu.matmul_together(&all[..count], None)?)
}

fn device_matrix(product: &Product) -> DeviceMatrix {
    DeviceMatrix { data: product.data, rows: product.matrix.rows, out: product.out }
}
