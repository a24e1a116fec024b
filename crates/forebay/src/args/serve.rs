//! Arguments of `forebay serve`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use forebay_server::{Address, KeepAlive};

use super::{BudgetArgs, FollowedArgs, KvArgs, MtpArgs, Parallel, count, parse};
use crate::size;

#[derive(Args)]
pub struct ServeArgs {
    /// GGUF files (or one file of a split set), packs, Hugging Face folders, or names of the library
    /// [default: all models of the library, or the demo model if it has none]
    #[arg(value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub model: Vec<PathBuf>,
    /// Names of the library by which models were given, with their paths.
    #[arg(skip)]
    pub from_library: Vec<(PathBuf, String)>,
    /// Unload a model when no request has used it for this time, such as 30s or 10m. A negative time
    /// keeps it until another model needs its memory [default: 5m; one MODEL stays]
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub keep_alive: Option<KeepAlive>,
    /// Name by which requests call the only MODEL [default: the name of its file or folder]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Answer N requests at a time; auto takes as many as the planner finds best, at least 4, or
    /// fewer if memory has no room for their contexts
    #[arg(long, value_name = "N|auto", value_parser = parse::parallel, default_value = "auto")]
    pub parallel: Parallel,
    /// Reserve a KV cache of N positions for all requests together. Requests that have no room
    /// wait, and answers stay the same [default: --ctx for each request]
    #[arg(long, value_name = "N", value_parser = count())]
    pub kv_tokens: Option<usize>,
    /// Aim for at most this time between two tokens of an answer, such as 200ms [default: about three
    /// times the usual time, while a prompt is read]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub max_latency: Option<Duration>,
    /// Let at most N requests wait; others get status 429
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub queue: usize,
    /// Add a line of JSON for every request to FILE, without prompts and keys; - is standard output.
    /// SIGHUP opens FILE again
    #[arg(long, value_name = "FILE|-", value_hint = ValueHint::FilePath)]
    pub access_log: Option<PathBuf>,
    /// Send a comment when a streamed answer has had no part for this many seconds, while a prompt is
    /// read or a model is loaded; 0 sends none
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub sse_ping_interval: u32,
    /// Let requests of one API key use keys and values of equal prompts of this key only, or of all
    /// keys. The time of an answer tells whether its prompt was known
    #[arg(long, value_enum, value_name = "key|all", default_value_t = SharePrefixes::Key)]
    pub share_prefixes: SharePrefixes,
    /// Let special tokens in messages, such as <|im_end|>, be special tokens. The writer of a part of a
    /// message can then end it and begin another one [default: they are text]
    #[arg(long)]
    pub special_tokens_in_messages: bool,
    #[command(flatten)]
    pub kv: KvArgs,
    #[command(flatten)]
    pub listen: ListenArgs,
    #[command(flatten)]
    pub files: FilesArgs,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub mtp: MtpArgs,
    // For measurements: answers then mean nothing.
    #[command(flatten)]
    pub followed: FollowedArgs,
}

/// Who shares keys and values of equal prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SharePrefixes {
    Key,
    All,
}

/// Where the server stores the files and batches of clients.
#[derive(Args)]
#[command(next_help_heading = "Files and batches")]
pub struct FilesArgs {
    /// Store files and batches of clients in DIR [default: forebay/files below $XDG_STATE_HOME, else
    /// below ~/.local/state]
    #[arg(long = "files", value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub folder: Option<PathBuf>,
    /// Refuse files that would make all files together larger. With several API keys, each has an equal
    /// part
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "4GiB")]
    pub files_size: u64,
    /// Refuse larger files
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "200MiB")]
    pub file_size: u64,
}

/// Where the server listens and who may use it.
#[derive(Args)]
#[command(next_help_heading = "Network")]
pub struct ListenArgs {
    /// Listen on this address; 0.0.0.0 is all of IPv4, and a path such as /run/forebay.sock or
    /// unix:PATH is a Unix socket
    #[arg(long, value_name = "ADDRESS", value_parser = host, default_value = "127.0.0.1")]
    pub host: Host,
    /// Listen on this port; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// Serve only clients that send one of the keys in FILE, one on each line
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_key_file: Option<PathBuf>,
    /// Let other machines use the server without a key
    #[arg(long, conflicts_with = "api_key_file")]
    pub insecure: bool,
    /// Let clients without a key reach this machine by this name, too; * lets all (repeatable)
    #[arg(long, value_name = "NAME", conflicts_with = "api_key_file")]
    pub allowed_host: Vec<String>,
    /// Let web pages of this origin use the server, as in https://example.com; * lets all (repeatable)
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Vec<String>,
    /// Give requests so much time to end after a signal tells the server to stop
    #[arg(long, value_name = "TIME", value_parser = parse::duration, default_value = "60s")]
    pub drain_time: Duration,
    /// Refuse requests with more bytes
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "32MiB")]
    pub max_body: u64,
}

/// Where the server listens, without the port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    Address(IpAddr),
    Unix(PathBuf),
}

/// Reads an address, `localhost`, or a path of a Unix socket, which ends in `.sock` or follows `unix:`.
fn host(text: &str) -> Result<Host, String> {
    let path = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:"));
    if let Some(path) = path.or_else(|| text.ends_with(".sock").then_some(text)) {
        return match path {
            "" => Err("the path of the Unix socket is missing".to_owned()),
            path => Ok(Host::Unix(path.into())),
        };
    }
    if text.eq_ignore_ascii_case("localhost") {
        return Ok(Host::Address(Ipv4Addr::LOCALHOST.into()));
    }
    let address = text.trim_start_matches('[').trim_end_matches(']').parse();
    address.map(Host::Address).map_err(|_| {
        "give an IP address, localhost, or a path that ends in .sock for a Unix socket".to_owned()
    })
}

impl ListenArgs {
    /// Returns where the server listens.
    pub fn address(&self) -> Address {
        match &self.host {
            Host::Address(address) => Address::Tcp(SocketAddr::new(*address, self.port)),
            Host::Unix(path) => Address::Unix(path.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_several_forms() {
        let address = |text: &str| Ok(Host::Address(text.parse().unwrap()));
        assert_eq!(host("localhost"), address("127.0.0.1"));
        assert_eq!(host("0.0.0.0"), address("0.0.0.0"));
        assert_eq!(host("[::1]"), address("::1"));
        for path in ["/tmp/x.sock", "unix:/tmp/x.sock", "unix:///tmp/x.sock"] {
            assert_eq!(host(path), Ok(Host::Unix("/tmp/x.sock".into())), "{path}");
        }
        for wrong in ["example.com", "", "unix:"] {
            assert!(host(wrong).is_err(), "{wrong}");
        }
    }
}
