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

    #[error(
        "there is nothing to continue: the last message must be one of the assistant with text and without tool calls"
    )]
    NothingToContinue,

    #[error(
        "this model's chat template does not write the last message's text, so it cannot be continued"
    )]
    NotContinued,

    #[error("this model's chat template has no tool calls that could be required")]
    NoToolCalls,

    #[error("there is no tool to call")]
    NoTools,

    #[error("there is no tool `{0}` among the tools")]
    UnknownTool(String),

    #[error(
        "this model answers with calls or with JSON: leave out the tools or the form of the answer"
    )]
    CallOrJson,
}
