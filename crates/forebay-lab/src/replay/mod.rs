//! Replays of recorded routing: every policy of the engine and bounds on them, LRU at all capacities, and predictors
//! of experts. Replays run the engine's cache state machine.

mod curve;
mod layers;
mod policy;
mod predictors;

pub use curve::LruCurve;
pub use policy::{ReplayPolicy, replay, replay_observed, replay_while};
pub use predictors::{Prediction, Predictor, predict};
