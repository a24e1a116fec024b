//! The gated activation of feed-forward blocks.

use forebay_ops::Gating;

use super::NarrowActivations;
use super::elementwise::{GRID_Y_MAX, THREADS, blocks};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Biases of experts, added before the gated activation.
#[derive(Clone, Copy)]
pub struct GateBiases {
    /// Shape `[experts, width]`, the same as `up`.
    pub gate: DevicePtr<f32>,
    pub up: DevicePtr<f32>,
    /// Expert of each row, or of each pair if `pairs` is given. It may differ from the number by which the expert's
    /// slot is found.
    pub ids: DevicePtr<u32>,
    /// Pair of each row: row r belongs to expert `ids[pairs[r]]`, or to `ids[r]` if null.
    pub pairs: DevicePtr<u32>,
}

/// Both halves of a feed-forward block, with rows `[rows, width]`. `out` may be `gate`.
#[derive(Clone, Copy)]
pub struct Gate {
    pub gate: DevicePtr<f32>,
    pub up: DevicePtr<f32>,
    pub out: DevicePtr<f32>,
    pub rows: usize,
    pub width: usize,
    pub gating: Gating,
    pub biases: Option<GateBiases>,
    /// Second output that gets `out` in the form [`super::NarrowForm::Half`], for widths that are multiples of 4.
    pub halves: Option<NarrowActivations>,
}

/// Returns true if only [`Gpu::activate_rows`] computes the function, and no kernel beside a product.
pub fn is_alone(gating: Gating) -> bool {
    matches!(gating, Gating::PlainGelu | Gating::PlainGeluTanh | Gating::Xielu { .. })
}

/// Returns the kernels' number of the function, with alpha and limit.
///
/// # Panics
/// Panics if no kernel beside a product computes the function ([`is_alone`]).
pub(super) fn arguments(gating: Gating) -> (usize, f32, f32) {
    match gating {
        Gating::Silu => (0, 0.0, 0.0),
        Gating::GeluTanh => (1, 0.0, 0.0),
        Gating::Clamped { alpha, limit } => (2, alpha, limit),
        // A square without a gate is that of the gate with itself.
        Gating::Relu | Gating::SquaredRelu => (3, 0.0, 0.0),
        Gating::ClampedSilu { limit } => (4, 1.0, limit),
        Gating::SiluClamped { limit } => (5, 1.0, limit),
        // The kernels' alpha is the limit of `u`.
        Gating::Situ { limit, up_limit } => (6, up_limit, limit),
        Gating::PlainGelu | Gating::PlainGeluTanh | Gating::Xielu { .. } => {
            panic!("{gating:?} beside a product")
        }
    }
}

impl Gpu {
    /// Computes `x = gating(x + bias)` for `x [rows, width]`, with an activation that has no gate. A null `bias` is none.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if the activation has a gate.
    pub fn activate_rows(
        &self,
        x: DevicePtr<f32>,
        bias: DevicePtr<f32>,
        rows: usize,
        width: usize,
        gating: Gating,
    ) -> Result<(), CudaError> {
        let (kind, numbers) = match gating {
            Gating::SquaredRelu => (0, [0.0; 4]),
            Gating::PlainGelu => (1, [0.0; 4]),
            Gating::PlainGeluTanh => (2, [0.0; 4]),
            Gating::Xielu { positive, negative, slope, floor } => {
                (3, [positive, negative, slope, floor])
            }
            _ => panic!("{gating:?} has a gate"),
        };
        let grid = (blocks(width), rows.min(GRID_Y_MAX) as u32, 1);
        let kernel = self.kernel("elementwise", "activate_rows")?;
        let launch = Launch::new(kernel, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .optional(bias, width)
            .int(width)
            .int(rows)
            .int(kind);
        numbers.into_iter().fold(launch, Launch::float).run(self)
    }

    /// Computes `out = gating(gate, up)`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned to 16 bytes, or if halves of rows are wanted whose width is no multiple of 4.
    pub fn gate(&self, gate: &Gate) -> Result<(), CudaError> {
        let none = (DevicePtr::null(), DevicePtr::null(), DevicePtr::null(), DevicePtr::null());
        let (gate_bias, up_bias, ids, pairs) =
            gate.biases.map_or(none, |b| (b.gate, b.up, b.ids, b.pairs));
        let pointers = [gate.gate, gate.up, gate.out, gate_bias, up_bias];
        let aligned = |pointer: &DevicePtr<f32>| pointer.address().is_multiple_of(16);
        assert!(pointers.iter().all(aligned), "gates are read by 16 bytes");
        let (kind, alpha, limit) = arguments(gate.gating);
        let values = gate.rows * gate.width;
        // What both kernels begin and end with.
        let with_rows = |launch: Launch| {
            launch.ptr(gate.gate, values).ptr(gate.up, values).ptr(gate.out, values)
        };
        let with_rule = |launch: Launch| {
            let launch = launch.int(kind).float(alpha).float(limit);
            let launch = launch.optional(gate_bias, gate.width).optional(up_bias, gate.width);
            launch.optional(ids, gate.rows).optional(pairs, gate.rows)
        };
        if let Some(halves) = gate.halves {
            assert!(gate.width.is_multiple_of(4), "halves of rows of {} elements", gate.width);
            assert!(halves.high.address().is_multiple_of(16), "halves are not aligned");
            let grid = (gate.rows as u32, 1, 1);
            let kernel = self.kernel("elementwise", "gate_halves")?;
            let launch = with_rows(Launch::new(kernel, grid, (THREADS as u32, 1, 1)))
                .ptr(halves.high, values)
                .ptr(halves.scales, gate.rows)
                .int(gate.width);
            return with_rule(launch).run(self);
        }
        // Without biases, rows make no difference, so all values are one row.
        let (rows, width) = match gate.biases {
            Some(_) => (gate.rows, gate.width),
            None => (1, gate.rows * gate.width),
        };
        let grid = (blocks(width.div_ceil(4)), rows.min(GRID_Y_MAX) as u32, 1);
        let kernel = self.kernel("elementwise", "gate")?;
        let launch = with_rows(Launch::new(kernel, grid, (THREADS as u32, 1, 1)));
        with_rule(launch.u64(width as u64).int(rows)).run(self)
    }
}
