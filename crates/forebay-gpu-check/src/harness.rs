//! Definition of a check, and the loop that runs checks.

use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use bytemuck::Pod;
use forebay_compute::{Arithmetic, Cpu, Isa, default_threads};
use forebay_cuda::{AddressTables, CudaError, DeviceMemory, Gpu, TableSize};
use serde_json::{Value, json};

/// Devices that checks run on: the GPU, and the CPU to compare with.
pub struct Context {
    pub gpu: Gpu,
    /// CPU with exact arithmetic.
    #[allow(
        dead_code,
        reason = "products are checked in f64; other families compare with the CPU"
    )]
    pub cpu: Cpu,
}

impl Context {
    pub fn open(ordinal: usize) -> Result<Context> {
        let gpu = Gpu::open(ordinal)?;
        let cpu = Cpu::new(default_threads(), Isa::selected()?, Arithmetic::Exact);
        Ok(Context { gpu, cpu })
    }

    pub fn describe(&self) -> String {
        let (major, minor) = self.gpu.compute_capability();
        let (name, sms) = (self.gpu.name(), self.gpu.multiprocessors());
        format!("{name}, compute capability {major}.{minor}, {sms} multiprocessors")
    }

    /// Allocates device memory for `count` `f32`s that are all NaN, so that elements a kernel fails to write are
    /// noticed.
    pub fn poisoned(&self, count: usize) -> Result<DeviceMemory, CudaError> {
        let memory = self.gpu.allocate(count * 4)?;
        self.gpu.fill(memory.ptr(), 0xff, count * 4)?;
        Ok(memory)
    }

    /// Creates an address table of `addresses`, each of which points to `slot_bytes` bytes of `slots`.
    pub fn table(
        &self,
        slots: &Arc<DeviceMemory>,
        slot_bytes: usize,
        addresses: &[u64],
    ) -> Result<AddressTables, CudaError> {
        let size = TableSize { entries: addresses.len(), slot_bytes: slot_bytes as u64 };
        let tables = self.gpu.address_tables(slots.clone(), &[size])?;
        tables.upload(&self.gpu, 0, addresses)?;
        Ok(tables)
    }

    /// Copies `values` to the device.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<DeviceMemory, CudaError> {
        self.gpu.allocate_with(values)
    }
}

/// Error of a kernel, and the largest that passes.
pub struct Outcome {
    /// Largest error, in the unit of `tolerance`. NaN fails.
    pub worst: f64,
    pub tolerance: f64,
    /// Where the error is largest: index, expected and actual value.
    pub place: String,
}

impl Outcome {
    pub fn passed(&self) -> bool {
        self.worst <= self.tolerance
    }

    /// Adds the name of the case to the description.
    pub fn at(mut self, case: &str) -> Outcome {
        self.place = format!("{case}: {}", self.place);
        self
    }

    /// Returns the outcome that is worse relative to its tolerance.
    pub fn worse(self, other: Outcome) -> Outcome {
        let ratio = |outcome: &Outcome| match outcome.worst / outcome.tolerance.max(1e-300) {
            ratio if ratio.is_nan() => f64::INFINITY,
            ratio => ratio,
        };
        if ratio(&other) > ratio(&self) { other } else { self }
    }

    /// Compares numbers. The error of number `i` is relative to `norm(i)`, which is a norm of the inputs it was
    /// computed from.
    pub fn of(
        got: &[f32],
        expected: &[f64],
        norm: impl Fn(usize) -> f64,
        tolerance: f64,
    ) -> Outcome {
        let mut outcome = Outcome { worst: 0.0, tolerance, place: String::new() };
        if got.len() != expected.len() {
            outcome.worst = f64::NAN;
            outcome.place = format!("{} numbers instead of {}", got.len(), expected.len());
            return outcome;
        }
        let mut wrong = 0;
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let error = (f64::from(*got) - expected).abs() / norm(i).max(1e-30);
            wrong += usize::from(error > tolerance || error.is_nan());
            if error > outcome.worst || (error.is_nan() && !outcome.worst.is_nan()) {
                outcome.worst = error;
                outcome.place = format!("[{i}] expected {expected:e}, got {got:e}");
            }
        }
        if wrong > 0 {
            outcome.place += &format!("; {wrong} of {} wrong, first at {:?}", got.len(), {
                (0..got.len()).find(|&i| {
                    let error = (f64::from(got[i]) - expected[i]).abs() / norm(i).max(1e-30);
                    error > tolerance || error.is_nan()
                })
            });
        }
        outcome
    }

    /// Passes if the sum of squared errors is at most `tolerance` times the sum of squares of `expected`.
    pub fn nmse(got: &[f32], expected: &[f32], tolerance: f64) -> Outcome {
        let pairs = got.iter().zip(expected).map(|(g, e)| (f64::from(*g), f64::from(*e)));
        let (error, power) = pairs.fold((0.0, 0.0), |(error, power), (got, expected)| {
            (error + (got - expected).powi(2), power + expected.powi(2))
        });
        let worst = if got.len() == expected.len() { error / power } else { f64::NAN };
        Outcome { worst, tolerance, place: format!("NMSE {worst:.1e}") }
    }

    /// Passes if all elements are equal.
    pub fn same<T: PartialEq + fmt::Debug>(got: &[T], expected: &[T]) -> Outcome {
        let differ = got.iter().zip(expected).filter(|(got, expected)| got != expected).count();
        let place = match got.iter().zip(expected).position(|(got, expected)| got != expected) {
            Some(i) => {
                let (got, expected) = (&got[i], &expected[i]);
                format!("{differ} differ, first [{i}] expected {expected:?}, got {got:?}")
            }
            None if got.len() != expected.len() => {
                format!("{} numbers instead of {}", got.len(), expected.len())
            }
            None => return Outcome { worst: 0.0, tolerance: 0.0, place: String::new() },
        };
        Outcome { worst: f64::INFINITY, tolerance: 0.0, place }
    }
}

type Run = Box<dyn Fn(&Context) -> Result<Outcome>>;

/// A named check: one kernel with one shape or a list of shapes.
pub struct Check {
    pub name: String,
    run: Run,
}

impl Check {
    pub fn new(
        name: impl Into<String>,
        run: impl Fn(&Context) -> Result<Outcome> + 'static,
    ) -> Check {
        Check { name: name.into(), run: Box::new(run) }
    }
}

/// Runs all checks and prints a line for each, then the failed ones again. Returns true if all passed, and a report.
pub fn run(context: &Context, checks: &[Check]) -> (bool, Value) {
    let mut rows = Vec::new();
    let mut failures = Vec::new();
    for check in checks {
        print!("{:<44} ", check.name);
        let _ = std::io::stdout().flush();
        let start = Instant::now();
        let (passed, line) = match (check.run)(context) {
            Ok(outcome) => {
                let (worst, tolerance) = (outcome.worst, outcome.tolerance);
                let passed = outcome.passed();
                let place = if passed { "" } else { &outcome.place };
                (passed, format!("worst {worst:9.2e} of {tolerance:8.1e} {place}"))
            }
            Err(error) => (false, format!("error: {error:#}")),
        };
        let word = if passed { "ok  " } else { "FAIL" };
        println!("{word} {line} ({:.1} s)", start.elapsed().as_secs_f64());
        rows.push(json!({ "name": check.name, "passed": passed, "result": line }));
        if !passed {
            failures.push(format!("{:<44} {line}", check.name));
        }
    }
    println!(
        "\n{} checks, {} passed, {} failed",
        rows.len(),
        rows.len() - failures.len(),
        failures.len()
    );
    for failure in &failures {
        println!("FAIL {failure}");
    }
    (failures.is_empty(), json!({ "gpu": context.describe(), "checks": rows }))
}
