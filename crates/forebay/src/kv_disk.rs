//! Opens the folder of KV blocks that the user chose.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use forebay_engine::{
    KvAccess, KvCacheType, KvDisk, KvDiskError, KvDiskOperation, KvDiskOptions, KvDiskStore,
    KvDiskType, KvDiskWatch, KvSecret, KvTransfer, SessionOptions,
};
use forebay_store::{IoRecorder, ReadEnd, Why};

use crate::args::{KvArgs, KvDiskTypeArg};
use crate::failure::{Failure, Outcome, usage};
use crate::output;

/// Most bytes of a key file that are read.
const KEY_BYTES: u64 = 1 << 20;

/// Bytes from the start of one segment to that of the next in traces: at least as many as a segment has.
const SEGMENT_BYTES: u64 = 256 << 20;

/// Records reads and writes of keys and values for `--trace-io`.
struct Recorded(IoRecorder);

impl KvDiskWatch for Recorded {
    fn ended(&self, transfer: &KvTransfer) {
        let why = match transfer.operation {
            KvDiskOperation::Read => Why::KvRead,
            KvDiskOperation::Write => Why::KvWrite,
        };
        let offset = transfer.segment.saturating_mul(SEGMENT_BYTES).saturating_add(transfer.offset);
        let length = u32::try_from(transfer.bytes).unwrap_or(u32::MAX);
        let end = transfer.failed.map_or(ReadEnd::Done, ReadEnd::Failed);
        self.0.kv(why, transfer.started, offset, length, end);
    }
}

/// Opens the folder, if there is one. A folder whose blocks have another key is not used, with a warning.
pub fn open(args: &KvArgs, session: &SessionOptions) -> Outcome<Option<KvDisk>> {
    let Some(folder) = &args.kv_disk else { return Ok(None) };
    if args.kv_ram == Some(0) {
        return usage("--kv-disk brings keys and values through RAM: --kv-ram must not be 0");
    }
    let ty = match args.kv_disk_type {
        KvDiskTypeArg::AsCached => KvDiskType::AsCached,
        KvDiskTypeArg::Q8_0 => KvDiskType::Q8_0,
    };
    if ty == KvDiskType::Q8_0 && (session.exact || session.kv_cache != KvCacheType::F16) {
        return usage(
            "--kv-disk-type q8_0 rounds keys and values in f16: leave out --exact, and --kv-type",
        );
    }
    let options = KvDiskOptions {
        bytes_per_day: Some(args.kv_disk_writes_per_day),
        watch: session.recorder.clone().map(|recorder| Arc::new(Recorded(recorder)) as _),
        secret: args.kv_disk_encrypt.as_deref().map(secret).transpose()?,
        ..KvDiskOptions::new(folder, args.kv_disk_size)
    };
    let store = match KvDiskStore::open(options) {
        Ok(store) => store,
        Err(error @ KvDiskError::WrongSecret { .. }) => {
            output::tell!("warning: {error}, so they are not used and none are written");
            return Ok(None);
        }
        Err(error) => return Err(refused(error)),
    };
    if store.access() == KvAccess::ReadOnly {
        output::tell!(
            "note: another process uses {}: KV blocks that are there now are read, and none are written",
            folder.display()
        );
    }
    if ty == KvDiskType::Q8_0 {
        output::tell!(
            "note: keys and values in {} are rounded to q8_0: answers differ a little if something is found there",
            folder.display()
        );
    }
    Ok(Some(KvDisk { store: Arc::new(store), ty }))
}

/// Tells a folder or a key that does not fit from other reasons.
pub fn refused(error: KvDiskError) -> Failure {
    match error {
        KvDiskError::OthersMayRead { .. }
        | KvDiskError::NotAStore { .. }
        | KvDiskError::Encrypted { .. }
        | KvDiskError::NotEncrypted { .. } => Failure::Usage(error.to_string()),
        error => error.into(),
    }
}

/// Reads a key file.
pub fn secret(path: &Path) -> Outcome<KvSecret> {
    let cannot = || format!("{}: the key cannot be read", path.display());
    let mode = fs::metadata(path).with_context(cannot)?.permissions().mode();
    if mode & 0o077 != 0 {
        return usage(format!(
            "{}: other users may read the key: run `chmod 600` on it",
            path.display()
        ));
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(KEY_BYTES).read_to_end(&mut bytes))
        .with_context(cannot)?;
    let secret = KvSecret::new(&bytes).ok_or_else(|| {
        anyhow!(
            "{}: a key has at least {} bytes: `head -c 32 /dev/urandom` makes one",
            path.display(),
            KvSecret::BYTES_LEAST
        )
    })?;
    Ok(secret)
}
