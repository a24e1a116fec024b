//! Arguments for the KV cache outside a device, and of `forebay kv`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

use crate::size;

/// Where keys and values go that the device has no room for.
#[derive(Args)]
#[command(next_help_heading = "KV cache")]
pub struct KvArgs {
    /// Keep keys and values in up to so much RAM, beside --ram, when the device needs their room.
    /// Repeated prompts are then not read again; 0 keeps none [default: as much as the KV cache
    /// has, at most 4GiB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse_or_zero)]
    pub kv_ram: Option<u64>,
    /// Keep the state of recurrent layers after every N tokens of a prompt, and near its end. Later prompts that
    /// share a prefix begin there; 0 keeps it only near the end [default: from the size of the state]
    #[arg(long, value_name = "N")]
    pub snapshot_every: Option<usize>,
    /// Keep keys and values in DIR, too, also after the end. A new folder can be read by you only
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub kv_disk: Option<PathBuf>,
    /// Let DIR have up to this many bytes; the least recently used is removed first
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "32GiB")]
    pub kv_disk_size: u64,
    /// Type of keys and values in DIR. q8_0 makes f16 about half as large and rounds it, so an answer may
    /// depend on what was in DIR
    #[arg(long, value_name = "TYPE", default_value = "as-cached", requires = "kv_disk")]
    pub kv_disk_type: KvDiskTypeArg,
    /// Write at most this many bytes to DIR on one day, to spare the disk
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "100GiB")]
    pub kv_disk_writes_per_day: u64,
    /// Encrypt what is in DIR with a key made from FILE, which holds at least 32 random bytes
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "kv_disk")]
    pub kv_disk_encrypt: Option<PathBuf>,
}

/// Type of keys and values on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvDiskTypeArg {
    AsCached,
    #[value(name = "q8_0")]
    Q8_0,
}

/// What `forebay kv` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvAction {
    /// List the models whose keys and values are in the folder
    List,
    /// Read everything in the folder and compare it with its checksums
    Verify,
    /// Remove what was not used for the longest time, until --size is left
    Gc,
    /// Remove everything, and the folder if nothing else is in it
    Wipe,
}

#[derive(Args)]
pub struct KvCommandArgs {
    /// What to do with the folder
    #[arg(value_enum, value_name = "ACTION")]
    pub action: KvAction,
    /// Folder that was given as --kv-disk
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub folder: PathBuf,
    /// File with the key of an encrypted folder
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub key: Option<PathBuf>,
    /// Bytes that gc leaves
    #[arg(long, value_name = "SIZE", value_parser = size::parse, required_if_eq("action", "gc"))]
    pub size: Option<u64>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}
