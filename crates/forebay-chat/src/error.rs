use forebay_text::TextError;

/// Error of reading or rendering messages.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    #[error(transparent)]
    Text(#[from] TextError),

    #[error("message {number}: {reason}")]
    Message { number: usize, reason: String },

    #[error("{0}")]
    NoMessages(&'static str),

    #[error("the chat template has no variable `{name}`; {known}")]
    UnknownVariable { name: String, known: String },

    #[error("{0}")]
    Think(String),
}
