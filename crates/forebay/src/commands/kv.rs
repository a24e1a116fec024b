//! `forebay kv`: lists, checks and empties folders of KV blocks.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use forebay_engine::{KvAccess, KvDiskOptions, KvDiskStore};
use indicatif::HumanDuration;
use serde::Serialize;

use crate::args::{KvAction, KvCommandArgs};
use crate::failure::{Failure, Outcome, usage};
use crate::output::{self, Align};
use crate::progress::BytesProgress;
use crate::{interrupt, kv_disk, open, size};

#[derive(Serialize)]
struct ListDocument {
    folder: PathBuf,
    bytes: u64,
    models: Vec<Model>,
}

#[derive(Serialize)]
struct Model {
    model: Option<String>,
    blocks: u64,
    bytes: u64,
    /// Times of the first and the last write, in seconds since 1970.
    first_written: u64,
    last_written: u64,
}

#[derive(Serialize)]
struct VerifyDocument {
    folder: PathBuf,
    blocks: u64,
    bytes: u64,
    damaged_blocks: usize,
    damage: Vec<String>,
}

#[derive(Serialize)]
struct GcDocument {
    folder: PathBuf,
    removed_bytes: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct WipeDocument {
    folder: PathBuf,
}

pub fn run(args: KvCommandArgs) -> Outcome {
    open::check(&args.folder)?;
    if args.size.is_some() && args.action != KvAction::Gc {
        return usage("--size is for gc");
    }
    match args.action {
        KvAction::List => list(args),
        KvAction::Verify => verify(args),
        KvAction::Gc => gc(args),
        KvAction::Wipe => {
            KvDiskStore::wipe(&args.folder).map_err(kv_disk::refused)?;
            match args.json {
                true => output::json(&WipeDocument { folder: args.folder }),
                false => Ok(()),
            }
        }
    }
}

fn open(args: &KvCommandArgs) -> Outcome<KvDiskStore> {
    let secret = args.key.as_deref().map(kv_disk::secret).transpose()?;
    let options = KvDiskOptions { secret, ..KvDiskOptions::new(&args.folder, u64::MAX) };
    KvDiskStore::open_existing(options).map_err(kv_disk::refused)
}

fn list(args: KvCommandArgs) -> Outcome {
    let store = open(&args)?;
    let bytes = store.statistics().bytes;
    let models = store.list().into_iter().map(|of| Model {
        model: of.model,
        blocks: of.blocks,
        bytes: of.bytes,
        first_written: of.written.0,
        last_written: of.written.1,
    });
    let models: Vec<Model> = models.collect();
    if args.json {
        return output::json(&ListDocument { folder: args.folder, bytes, models });
    }
    if models.is_empty() {
        output::tell!("no KV blocks in {}", args.folder.display());
        return Ok(());
    }
    let mut rows = vec![["MODEL", "BLOCKS", "SIZE", "LAST WRITTEN"].map(String::from).to_vec()];
    rows.extend(models.into_iter().map(|of| {
        let last = UNIX_EPOCH + Duration::from_secs(of.last_written);
        let age = SystemTime::now().duration_since(last).unwrap_or_default();
        let age = HumanDuration(Duration::from_secs(age.as_secs()));
        vec![
            of.model.unwrap_or_else(|| "unknown".to_owned()),
            output::grouped(of.blocks),
            size::format(of.bytes),
            format!("{age} ago"),
        ]
    }));
    let columns = [Align::Left, Align::Right, Align::Right, Align::Left];
    output::print(&output::table(&columns, &rows))
}

fn verify(args: KvCommandArgs) -> Outcome {
    let store = open(&args)?;
    let before = store.statistics();
    let token = interrupt::token();
    let mut progress = BytesProgress::new("verifying");
    let damages = store.verify(|done, total| {
        progress.update(done.min(total), total);
        !token.is_requested()
    });
    drop(progress);
    token.check()?;
    let damage: Vec<String> = damages.iter().map(ToString::to_string).collect();
    let (blocks, damaged) = (before.blocks, damage.len());
    if args.json {
        output::json(&VerifyDocument {
            folder: args.folder.clone(),
            blocks,
            bytes: before.bytes,
            damaged_blocks: damaged,
            damage: damage.clone(),
        })?;
    }
    let folder = args.folder.display();
    if let Some(first) = damage.first() {
        return Err(Failure::Work(anyhow!(
            "{folder}: damaged: {damaged} of {blocks} blocks, which will be computed again; the first: {first}"
        )));
    }
    if !args.json {
        let bytes = size::format(before.bytes);
        output::tell!("{folder}: undamaged; {} blocks, {bytes}", output::grouped(blocks));
    }
    Ok(())
}

fn gc(args: KvCommandArgs) -> Outcome {
    let store = open(&args)?;
    if store.access() == KvAccess::ReadOnly {
        return Err(Failure::Work(anyhow!(
            "{} is in use by another process",
            args.folder.display()
        )));
    }
    let removed = store.shrink(args.size.unwrap_or_default())?;
    let left = store.statistics().bytes;
    if args.json {
        let folder = args.folder;
        return output::json(&GcDocument { folder, removed_bytes: removed, bytes: left });
    }
    output::tell!("removed {}, {} are left", size::format(removed), size::format(left));
    Ok(())
}
