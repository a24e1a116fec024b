//! Errors of routing traces.

use forebay_options::OptionName;

/// Errors of recording how routers choose experts, and of repeating it.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    #[error("the routing trace cannot be written: {0}")]
    Write(std::io::Error),
    /// The routing trace has another shape than this model's routers, so it cannot replace them.
    #[error("the routing trace has {trace}, the model {model}: they must be the same")]
    Other { trace: String, model: String },
    #[error("{0}")]
    Profile(String),
    #[error("{}: this model has no experts to choose; leave it out", OptionName::TraceRouting)]
    NoExperts,
    #[error(
        "{}: only the CPU gives the routers' scores; use {}, or leave it out",
        OptionName::TraceScores,
        OptionName::Device.with("cpu")
    )]
    NoScores,
}
