//! Errors and the progress callback of [`super::synthesize`].

use forebay_format::FormatError;
use forebay_options::OptionName;
use forebay_store::OutputError;

use super::recipe::Recipe;

/// Progress callback, called with the bytes written so far and in total. Returning false stops the work and removes the
/// unfinished file.
pub type Progress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// Errors of [`super::synthesize`].
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    #[error("no architecture is called {name:?}; known: {}", known.join(", "))]
    UnknownArchitecture { name: String, known: Vec<&'static str> },
    #[error("no quantisation is called {name:?}; known: {}", known.join(", "))]
    UnknownQuantisation { name: String, known: Vec<&'static str> },
    #[error(
        "{shape} has {layers_max} layers; {layers} cannot be written, choose {layers_min} to {layers_max}"
    )]
    Layers { shape: &'static str, layers: u32, layers_min: u32, layers_max: u32 },
    #[error(
        "{shape} has {experts} experts in a layer; {used} of them cannot be used for a token, choose 1 to {most}"
    )]
    ExpertsUsed { shape: &'static str, experts: u32, used: u32, most: u32 },
    #[error("{shape} has no experts: leave {} out", OptionName::ExpertsUsed)]
    NoExperts { shape: &'static str },
    #[error("{shape} has no layer for multi-token prediction: leave {} out", OptionName::Mtp)]
    NoMtp { shape: &'static str },
    #[error("interrupted; the unfinished file was removed")]
    Interrupted,
    #[error(transparent)]
    Format(FormatError),
    #[error(transparent)]
    Output(#[from] OutputError),
}

impl From<FormatError> for SynthError {
    fn from(error: FormatError) -> Self {
        // A failed write already has its own path and cause.
        match error {
            FormatError::Io { path, source } => match source.downcast::<OutputError>() {
                Ok(error) => Self::Output(error),
                Err(source) => Self::Format(FormatError::Io { path, source }),
            },
            error => Self::Format(error),
        }
    }
}

impl SynthError {
    pub(super) fn unknown_quantisation(name: &str) -> Self {
        Self::UnknownQuantisation { name: name.to_owned(), known: Recipe::names() }
    }
}
