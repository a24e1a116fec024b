//! Tests of the block manager: cases by hand, and random calls against a naive model.

mod cases;
mod figures;
mod invariants;
mod model;
mod random;
