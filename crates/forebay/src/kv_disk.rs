//! Opens the folder of KV blocks that the user chose.

use std::path::Path;
use std::sync::Arc;

use forebay_engine::{
    KvDisk, KvDiskError, KvDiskOperation, KvDiskType, KvDiskWatch, KvFolder, KvFolderError,
    KvSecret, KvTransfer, OpenedKvFolder, SessionOptions, kv_secret,
};
use forebay_store::{IoRecorder, ReadEnd, Why};

use crate::args::{KvArgs, KvDiskTypeArg};
use crate::failure::{Failure, Outcome};
use crate::output;

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

/// Opens the folder, if there is one, for an engine with these options.
pub fn open(args: &KvArgs, session: &SessionOptions) -> Outcome<Option<KvDisk>> {
    let Some(folder) = &args.kv_disk else { return Ok(None) };
    let folder = KvFolder {
        path: folder.clone(),
        bytes: args.kv_disk_size,
        ty: match args.kv_disk_type {
            KvDiskTypeArg::AsCached => KvDiskType::AsCached,
            KvDiskTypeArg::Q8_0 => KvDiskType::Q8_0,
        },
        bytes_per_day: args.kv_disk_writes_per_day,
        key: args.kv_disk_encrypt.clone(),
    };
    let watch = session.recorder.clone().map(|recorder| Arc::new(Recorded(recorder)) as _);
    let OpenedKvFolder { disk, notes } = folder.open(session, watch).map_err(of)?;
    for note in notes {
        let kind = if note.is_warning { "warning" } else { "note" };
        output::tell!("{kind}: {}", note.text);
    }
    Ok(disk)
}

/// Tells options that do not fit from other reasons.
fn of(error: KvFolderError) -> Failure {
    match error.is_of_options() {
        true => Failure::Usage(error.to_string()),
        false => error.into(),
    }
}

pub fn refused(error: KvDiskError) -> Failure {
    of(error.into())
}

/// Reads a key file.
pub fn secret(path: &Path) -> Outcome<KvSecret> {
    kv_secret(path).map_err(of)
}
