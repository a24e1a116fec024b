//! HTTP server with the interfaces of OpenAI, Anthropic and Ollama.
//!
//! [`Listener::bind`] takes an address, [`Models`] loads and unloads the models that requests name, each with an engine on a
//! thread of its own, and [`Listener::serve`] answers requests until it is told to stop. Handlers turn a request of any
//! interface into the same form ([`Wanted`](forebay_requests::Wanted)), and answers of the engine into that of the interface.

#![forbid(unsafe_code)]

mod access;
mod access_log;
mod anthropic;
mod app;
pub mod batches;
mod body;
mod caller;
pub mod client;
mod connections;
mod embeddings;
mod error;
mod files;
mod half_close;
mod large;
mod lifetime;
mod live;
mod llama_cpp;
mod machine_metrics;
mod metrics;
mod model;
mod models;
mod ollama;
mod openai;
mod openapi;
mod operations;
mod page;
mod paths;
mod plan;
mod pool;
mod quota;
mod remarks;
mod request_log;
mod responses;
mod routes;
mod run;
mod server;
mod sockets;
mod statistics;
mod stream;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use forebay_engine::EngineError;
use forebay_options::OptionName;
use forebay_requests::TemplateError;

pub use access::Keys;
pub use access_log::{AccessLog, AccessLogTarget};
pub use files::FilesOptions;
pub use live::Outlook;
pub use models::{
    Catalogue, Entry, KeepAlive, LoadError, Loaded, Loader, Memory, Models, ModelsOptions,
    PullError,
};
pub use plan::PlanReport;
pub use server::{CLIENT_TIME, CONNECTIONS_MAX, Listener, ServerOptions};
pub use sockets::Address;

/// Reason why a server cannot start or has to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: Address, source: std::io::Error },
    #[error(
        "{address} can be reached from other machines: give {}, so that only those with a key can use it, or \
         {}",
        OptionName::ApiKeyFile.with("FILE"),
        OptionName::Insecure
    )]
    Open { address: Address },
    #[error("{origin:?} is no origin: write it as https://example.com")]
    Origin { origin: String },
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error("the server cannot run: {0}")]
    Io(#[from] std::io::Error),
}
