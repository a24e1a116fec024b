//! Arguments for the KV cache outside a device, and of `forebay kv`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use crate::size;

/// Where keys and values go that the device has no room for.
#[derive(Args)]
#[command(next_help_heading = "KV cache")]
pub struct KvArgs {
    /// Keep keys and values in up to so much RAM, beside --ram, when the device needs their room.
    /// Prompts that come again are then not read again [default: as much as the KV cache has, at most
    /// 4GiB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub kv_ram: Option<u64>,
    /// Keep keys and values in DIR, too, also after the end. A new folder can be read by you only
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub kv_disk: Option<PathBuf>,
    /// Let DIR have up to so many bytes; what was not used for the longest time goes first
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "32GiB")]
    pub kv_disk_size: u64,
    /// Write at most so many bytes to DIR on one day, to spare the disk
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "100GiB")]
    pub kv_disk_writes_per_day: u64,
    /// Encrypt what is in DIR with a key made from FILE, which holds at least 32 random bytes
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "kv_disk")]
    pub kv_disk_encrypt: Option<PathBuf>,
}

/// A folder of KV blocks.
#[derive(Args)]
pub struct KvFolderArgs {
    /// Folder that was given as --kv-disk
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub folder: PathBuf,
    /// File with the key of an encrypted folder
    #[arg(long = "key", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub key: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct KvCommandArgs {
    #[command(subcommand)]
    pub action: KvAction,
}

#[derive(Subcommand)]
pub enum KvAction {
    /// List the models whose keys and values are in a folder
    List(KvFolderArgs),
    /// Read everything in a folder and compare it with its checksums
    Verify(KvFolderArgs),
    /// Remove what was not used for the longest time, until so much is left
    Gc {
        #[command(flatten)]
        folder: KvFolderArgs,
        /// Bytes that may be left
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        size: u64,
    },
    /// Remove everything from a folder, and the folder if nothing else is in it
    Wipe {
        /// Folder that was given as --kv-disk
        #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
        folder: PathBuf,
    },
}

impl KvCommandArgs {
    /// Returns true if the command prints JSON.
    pub fn json(&self) -> bool {
        match &self.action {
            KvAction::List(folder) | KvAction::Verify(folder) | KvAction::Gc { folder, .. } => {
                folder.json
            }
            KvAction::Wipe { .. } => false,
        }
    }
}
