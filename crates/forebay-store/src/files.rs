//! The files of a model, opened for cached and for direct reads.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_format::pack::Chunk;
use forebay_format::{Block, Catalog, Extent, FileIndex};
use rustix::fs::{AtFlags, StatxFlags, fstatfs, statx};

use crate::arena::SLOT_ALIGNMENT;
use crate::chunks::{BadChunk, Chunks};
use crate::engine::BlockLabel;
use crate::error::StoreError;
use crate::interrupt::Interrupt;
use crate::layout::{BlockLayout, Covered};
#[cfg(feature = "objects")]
use crate::objects::{Object, Objects};
use crate::storage::Storage;
use crate::trace::{IoRecorder, ReadEnd, ReadRecord, Why, nanoseconds};

/// Alignment of files that need none. Parts keep their position within a cache line that they have in the file.
const CACHED_ALIGNMENT: usize = 64;
/// Alignment of files in memory, which represent a disk in simulations.
const SIMULATED_ALIGNMENT: usize = 512;

/// Open files, in the order of their [`FileIndex`]. Clones share them.
#[derive(Clone, Debug)]
pub struct FileSet {
    files: Arc<[StoredFile]>,
    recorder: Option<IoRecorder>,
    interrupt: Option<Interrupt>,
}

#[derive(Debug)]
pub(crate) struct StoredFile {
    pub path: PathBuf,
    pub bytes: u64,
    /// Chunks of a pack. `None` if nothing is coded and no checksums are to be verified.
    pub chunks: Option<Chunks>,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Disk {
        cached: Arc<File>,
        direct: Result<DirectFile, String>,
    },
    Memory(Arc<[u8]>),
    #[cfg(feature = "objects")]
    Object(Arc<Object>, Arc<Objects>),
}

#[derive(Clone, Debug)]
struct DirectFile {
    file: Arc<File>,
    alignment: usize,
}

impl FileSet {
    /// Opens every file for cached reads, and also for direct reads (`O_DIRECT`) if its file system supports them.
    ///
    /// # Errors
    /// Returns [`StoreError::Open`] if a file cannot be opened, and [`StoreError::NotAFile`] if it is not a regular
    /// file.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<FileSet, StoreError> {
        FileSet::open_in(&Storage::Disk, paths)
    }

    /// Opens files like [`FileSet::open`], in any place. Those of a store are the ones that were opened for their
    /// headers.
    ///
    /// # Errors
    /// Returns the errors of [`FileSet::open`].
    pub fn open_in<P: AsRef<Path>>(storage: &Storage, paths: &[P]) -> Result<FileSet, StoreError> {
        let open = |path: &P| StoredFile::open(storage, path.as_ref());
        let files = paths.iter().map(open).collect::<Result<_, _>>()?;
        Ok(FileSet { files, recorder: None, interrupt: None })
    }

    /// Opens the files of a model. With `verify`, every block of a pack is verified against its checksums, so that no
    /// damaged byte is ever returned. Other containers have no checksums.
    ///
    /// # Errors
    /// Returns the errors of [`FileSet::open`].
    pub fn of_catalog(catalog: &Catalog, verify: bool) -> Result<FileSet, StoreError> {
        FileSet::of_catalog_in(&Storage::Disk, catalog, verify)
    }

    /// Opens the files of a model like [`FileSet::of_catalog`], in any place.
    ///
    /// # Errors
    /// Returns the errors of [`FileSet::open`].
    pub fn of_catalog_in(
        storage: &Storage,
        catalog: &Catalog,
        verify: bool,
    ) -> Result<FileSet, StoreError> {
        let open = |path: &PathBuf| StoredFile::open(storage, path);
        let mut files = catalog.files.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let pack = catalog.pack.as_ref().filter(|pack| verify || pack.chunks.is_coded());
        if let (Some(pack), Some(file)) = (pack, files.first_mut()) {
            file.chunks = Some(Chunks::new(Arc::clone(&pack.chunks), verify));
        }
        Ok(FileSet { files: files.into(), recorder: None, interrupt: None })
    }

    /// Returns true if any of the files is verified against checksums.
    pub fn is_checked(&self) -> bool {
        self.files.iter().any(|file| file.chunks.as_ref().is_some_and(|chunks| chunks.verify))
    }

    /// Returns true if blocks of any of the files are coded. Their bytes are decoded when they are read: all offsets are those of the
    /// decoded file.
    pub fn is_coded(&self) -> bool {
        self.files.iter().any(|file| file.chunks.as_ref().is_some_and(Chunks::is_coded))
    }

    /// Returns the same files with offsets of the stored file, so that nothing is decoded. Checksums are verified as before.
    pub fn as_stored(&self) -> FileSet {
        let stored = |file: &StoredFile| StoredFile {
            path: file.path.clone(),
            bytes: file.bytes,
            chunks: file.chunks.as_ref().map(Chunks::of_stored),
            content: file.content.clone(),
        };
        let files = self.files.iter().map(stored).collect();
        FileSet { files, ..self.clone() }
    }

    /// Returns the chunks that store an extent, or none if its block is not coded.
    pub fn coded_chunks(&self, extent: Extent) -> Vec<Chunk> {
        let coded = self.file(extent.file).and_then(|file| file.coded(extent.offset));
        let chunks = coded.map(|coded| coded.chunks(extent.offset..extent.end()).collect());
        chunks.unwrap_or_default()
    }

    /// Returns the extent of the stored file that is read for an extent of the decoded file. Without coded blocks, the two are the same.
    pub fn stored(&self, extent: Extent) -> Extent {
        match self.file(extent.file).and_then(|file| file.chunks.as_ref()) {
            None => extent,
            Some(chunks) => {
                let Range { start, end } = chunks.stored(extent.offset..extent.end());
                Extent { file: extent.file, offset: start, length: end - start }
            }
        }
    }

    /// Plans a slot for `extents` like [`BlockLayout::plan`], with room for every whole chunk that has a checksum.
    pub fn plan(&self, extents: &[Extent], alignment: usize) -> BlockLayout {
        BlockLayout::plan_covering(extents, None, alignment, &|extent| self.cover(extent))
    }

    /// Plans a slot like [`FileSet::plan`] for a block, which may have a relayout of some of its extents.
    pub fn plan_block(&self, block: &Block, alignment: usize) -> BlockLayout {
        let (extents, relayout) = (&block.extents, block.relayout.as_ref());
        BlockLayout::plan_covering(extents, relayout, alignment, &|extent| self.cover(extent))
    }

    /// Returns the range that must be read for an extent of a pack.
    fn cover(&self, extent: &Extent) -> Option<Covered> {
        let chunks = self.file(extent.file)?.chunks.as_ref()?;
        let range = chunks.cover(extent.offset..extent.end());
        let is_coded = chunks.is_coded_at(extent.offset);
        (is_coded || chunks.verify).then_some(Covered { range, is_coded })
    }

    /// Creates files that exist only in memory. The simulated engine reads them, and the other engines refuse them.
    pub fn in_memory(images: Vec<Vec<u8>>) -> FileSet {
        let stored = |(index, image): (usize, Vec<u8>)| StoredFile {
            path: PathBuf::from(format!("memory-{index}")),
            bytes: image.len() as u64,
            chunks: None,
            content: Content::Memory(image.into()),
        };
        let files = images.into_iter().enumerate().map(stored).collect();
        FileSet { files, recorder: None, interrupt: None }
    }

    /// Returns the same files with a recorder. Small reads of them, and the reads of engines opened for them, are
    /// recorded.
    pub fn recorded(mut self, recorder: &IoRecorder) -> FileSet {
        self.recorder = Some(recorder.clone());
        self
    }

    /// Returns the same files with an interrupt. Loads, copies and small reads of them, and engines opened for them,
    /// stop when `interrupt` is requested.
    pub fn interruptible(mut self, interrupt: &Interrupt) -> FileSet {
        self.interrupt = Some(interrupt.clone());
        self
    }

    /// Returns the interrupt that stops reads of these files, if there is one.
    pub fn interrupt(&self) -> Option<&Interrupt> {
        self.interrupt.as_ref()
    }

    /// Returns an error if reads of these files are to stop.
    ///
    /// # Errors
    /// Returns [`StoreError::Interrupted`] if the interrupt was requested.
    pub fn check_interrupt(&self) -> Result<(), StoreError> {
        self.interrupt.as_ref().map_or(Ok(()), Interrupt::check)
    }

    pub(crate) fn recorder(&self) -> Option<&IoRecorder> {
        self.recorder.as_ref()
    }

    /// Returns the number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Returns the size in bytes that a file had when it was opened, or `None` for an unknown index.
    pub fn file_bytes(&self, index: FileIndex) -> Option<u64> {
        self.file(index).map(|file| file.bytes)
    }

    /// Returns the path of a file, or `None` for an unknown index.
    pub fn path(&self, index: FileIndex) -> Option<PathBuf> {
        self.file(index).map(|file| file.path.clone())
    }

    /// Returns an alignment that suits every file, for [`crate::BlockLayout::plan`]. It is a power of two up to 4096.
    pub fn alignment(&self) -> usize {
        self.files.iter().map(StoredFile::planned_alignment).max().unwrap_or(CACHED_ALIGNMENT)
    }

    /// Returns the reason why some file is not read past the page cache, or `None` if all are.
    pub fn why_not_direct(&self) -> Option<String> {
        crate::device::why_not_direct(self, true)
    }

    /// Fills `out` with the bytes of `extent` through the page cache. It is meant for norms, embedding rows and other
    /// small reads.
    ///
    /// # Errors
    /// Returns [`StoreError::UnexpectedEnd`] if the file ends before the extent does, [`StoreError::Read`],
    /// [`StoreError::Corrupt`], and [`StoreError::Interrupted`]. Returns [`StoreError::UnknownFile`] or
    /// [`StoreError::BufferLength`] if the extent does not fit the files or `out`.
    pub fn read_exact(&self, extent: Extent, out: &mut [u8]) -> Result<(), StoreError> {
        self.check_interrupt()?;
        let file = self
            .file(extent.file)
            .ok_or(StoreError::UnknownFile { index: extent.file.0, files: self.files.len() })?;
        if extent.length != out.len() as u64 {
            return Err(StoreError::BufferLength {
                extent_bytes: extent.length,
                buffer_bytes: out.len(),
            });
        }
        self.record_read(extent, None, Why::Small, || file.read_checked_at(extent.offset, out))
    }

    /// Fills `out` like [`FileSet::read_exact`], for a part of a block that is being loaded. Verifies checksums of coded
    /// blocks only.
    pub(crate) fn read_for_load(
        &self,
        index: FileIndex,
        offset: u64,
        out: &mut [u8],
        block: BlockLabel,
    ) -> Result<(), StoreError> {
        let file = self
            .file(index)
            .ok_or(StoreError::UnknownFile { index: index.0, files: self.files.len() })?;
        let extent = Extent { file: index, offset, length: out.len() as u64 };
        self.record_read(extent, Some(block), Why::Load, || match file.coded(offset) {
            Some(_) => file.read_checked_at(offset, out),
            None => file.read_exact_at(file.stored_offset(offset), out),
        })
    }

    /// Calls `read`, and records it if there is a recorder.
    fn record_read(
        &self,
        extent: Extent,
        block: Option<BlockLabel>,
        why: Why,
        read: impl FnOnce() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let Some(recorder) = &self.recorder else { return read() };
        let started = recorder.now();
        let result = read();
        let record = cached_read(self.stored(extent), started, recorder.now(), &result);
        recorder.read(ReadRecord { block, why, ..record });
        result
    }

    /// Calls `read`, which loads a part of a block directly to a device, and records it if there is a recorder.
    /// `attempt` is the number of the read within one span, from 0.
    pub(crate) fn record_straight(
        &self,
        extent: Extent,
        block: BlockLabel,
        attempt: u32,
        read: impl FnOnce() -> std::io::Result<usize>,
    ) -> std::io::Result<usize> {
        let Some(recorder) = &self.recorder else { return read() };
        let started = recorder.now();
        let result = read();
        let record = cached_read(extent, started, recorder.now(), &Ok(()));
        let (bytes, end) = match &result {
            Ok(bytes) => (u32::try_from(*bytes).unwrap_or(u32::MAX), ReadEnd::Done),
            Err(error) => (0, ReadEnd::Failed(error.raw_os_error().unwrap_or(libc::EIO))),
        };
        let block = Some(block);
        recorder.read(ReadRecord { bytes, block, why: Why::Load, attempt, end, ..record });
        result
    }

    /// Returns a new descriptor of a file, opened with `O_DIRECT`, for a caller that itself reads past the page cache.
    ///
    /// # Errors
    /// Returns [`StoreError::Unavailable`] if `engine` cannot read this file past the page cache, [`StoreError::Open`]
    /// if the descriptor cannot be duplicated, and [`StoreError::UnknownFile`] for an unknown index.
    pub fn direct_descriptor(
        &self,
        index: FileIndex,
        engine: &'static str,
    ) -> Result<OwnedFd, StoreError> {
        let file = self
            .file(index)
            .ok_or(StoreError::UnknownFile { index: index.0, files: self.files.len() })?;
        let direct = match &file.content {
            Content::Disk { direct: Ok(direct), .. } => direct,
            _ => {
                let why = file.why_not_direct().unwrap_or_default();
                let why =
                    format!("{} cannot be read past the page cache: {why}", file.path.display());
                return Err(StoreError::Unavailable { engine, why });
            }
        };
        let copied = direct.file.try_clone();
        let failed = |source| StoreError::Open { file: file.path.clone(), source };
        Ok(copied.map_err(failed)?.into())
    }

    /// Returns the descriptors to read through.
    ///
    /// # Errors
    /// Returns [`StoreError::Unavailable`] for files in memory, which `engine` cannot read.
    pub(crate) fn descriptors(
        &self,
        direct: bool,
        engine: &'static str,
    ) -> Result<Vec<RawFd>, StoreError> {
        let descriptors = self.files.iter().map(|file| file.descriptor(direct));
        descriptors.collect::<Option<_>>().ok_or_else(|| {
            let why = "files in memory or in a store have engines of their own".to_owned();
            StoreError::Unavailable { engine, why }
        })
    }

    /// Returns true if the files are in object stores or on HTTP servers.
    pub fn is_remote(&self) -> bool {
        self.remote_bytes().is_some()
    }

    /// Returns how many bytes of reads should be on the way or wait at a time, if the files are remote. That is twice what
    /// their connections ask for, so that there is work for a connection that becomes free.
    pub fn remote_bytes(&self) -> Option<u64> {
        #[cfg(feature = "objects")]
        if let Content::Object(_, source) = &self.files.first()?.content {
            let options = source.options();
            return Some(2 * options.connections as u64 * options.request_bytes as u64);
        }
        None
    }

    /// Returns the objects that the files are, and the store that they are in. Returns `None` if any is none.
    #[cfg(feature = "objects")]
    pub(crate) fn objects(&self) -> Option<(Arc<Objects>, Vec<Arc<Object>>)> {
        let object = |file: &StoredFile| match &file.content {
            Content::Object(object, _) => Some(Arc::clone(object)),
            _ => None,
        };
        let objects = self.files.iter().map(object).collect::<Option<_>>()?;
        match &self.files.first()?.content {
            Content::Object(_, source) => Some((Arc::clone(source), objects)),
            _ => None,
        }
    }

    pub(crate) fn file(&self, index: FileIndex) -> Option<&StoredFile> {
        self.files.get(index.0 as usize)
    }

    pub(crate) fn files(&self) -> &[StoredFile] {
        &self.files
    }
}

fn cached_read(
    extent: Extent,
    started: std::time::Duration,
    ended: std::time::Duration,
    result: &Result<(), StoreError>,
) -> ReadRecord {
    let length = u32::try_from(extent.length).unwrap_or(u32::MAX);
    let (bytes, end) = match result {
        Ok(()) => (length, ReadEnd::Done),
        Err(StoreError::Read { source, .. }) => {
            (0, ReadEnd::Failed(source.raw_os_error().unwrap_or(libc::EIO)))
        }
        Err(_) => (0, ReadEnd::Done),
    };
    ReadRecord {
        start_nanoseconds: nanoseconds(started),
        duration_nanoseconds: nanoseconds(ended.saturating_sub(started)),
        file: extent.file,
        offset: extent.offset,
        length,
        bytes,
        block: None,
        why: Why::Small,
        attempt: 0,
        end,
        faults: None,
    }
}

/// Returns the kernel's number for the type of the file system that `path` is on.
///
/// # Errors
/// Returns an error if the kernel does not report the type.
pub fn filesystem_type(path: &Path) -> std::io::Result<u64> {
    Ok(rustix::fs::statfs(path)?.f_type as u64)
}

impl StoredFile {
    fn open(storage: &Storage, path: &Path) -> Result<StoredFile, StoreError> {
        match storage {
            Storage::Disk => StoredFile::on_disk(path),
            #[cfg(feature = "objects")]
            Storage::Objects(objects) => {
                let failed = |source| StoreError::Open { file: path.to_path_buf(), source };
                let object = objects.object(path).map_err(failed)?;
                let bytes = object.bytes();
                object.forget_head();
                let content = Content::Object(object, Arc::clone(objects));
                Ok(StoredFile { path: path.to_owned(), bytes, chunks: None, content })
            }
        }
    }

    fn on_disk(path: &Path) -> Result<StoredFile, StoreError> {
        let failed = |source| StoreError::Open { file: path.to_path_buf(), source };
        // Check the type before opening, because opening a named pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(StoreError::NotAFile { file: path.to_path_buf() });
        }
        let cached = File::open(path).map_err(failed)?;
        let bytes = cached.metadata().map_err(failed)?.len();
        let direct = DirectFile::open(path);
        Ok(StoredFile {
            path: path.to_path_buf(),
            bytes,
            chunks: None,
            content: Content::Disk { cached: Arc::new(cached), direct },
        })
    }

    fn planned_alignment(&self) -> usize {
        match &self.content {
            Content::Disk { direct: Ok(direct), .. } => direct.alignment,
            Content::Disk { .. } => CACHED_ALIGNMENT,
            Content::Memory(_) => SIMULATED_ALIGNMENT,
            #[cfg(feature = "objects")]
            Content::Object(..) => CACHED_ALIGNMENT,
        }
    }

    /// Returns the alignment that reads of this file need for offset, length and memory.
    pub(crate) fn read_alignment(&self, direct: bool) -> usize {
        match &self.content {
            Content::Disk { direct: Ok(file), .. } if direct => file.alignment,
            Content::Disk { .. } => 1,
            Content::Memory(_) => SIMULATED_ALIGNMENT,
            #[cfg(feature = "objects")]
            Content::Object(..) => 1,
        }
    }

    /// Returns the descriptor to read through, or `None` for a file in memory.
    pub(crate) fn descriptor(&self, direct: bool) -> Option<RawFd> {
        match &self.content {
            Content::Disk { direct: Ok(file), .. } if direct => Some(file.file.as_raw_fd()),
            Content::Disk { cached, .. } => Some(cached.as_raw_fd()),
            Content::Memory(_) => None,
            #[cfg(feature = "objects")]
            Content::Object(..) => None,
        }
    }

    /// Returns the reason why this file cannot be read directly, or `None` if it can.
    pub(crate) fn why_not_direct(&self) -> Option<&str> {
        match &self.content {
            Content::Disk { direct: Err(why), .. } => Some(why),
            Content::Disk { .. } => None,
            Content::Memory(_) => Some("it is in memory"),
            #[cfg(feature = "objects")]
            Content::Object(..) => Some("it is in an object store"),
        }
    }

    /// Reads once, like a disk: returns as many bytes as there are up to the end of the file.
    pub(crate) fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<usize> {
        match &self.content {
            Content::Disk { cached, .. } => cached.read_at(out, offset),
            Content::Memory(image) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(image.len());
                let count = out.len().min(image.len() - start);
                out[..count].copy_from_slice(&image[start..start + count]);
                Ok(count)
            }
            #[cfg(feature = "objects")]
            Content::Object(object, source) => source.read_at(object, offset, out),
        }
    }

    /// Returns the chunks if this byte belongs to a coded block.
    pub(crate) fn coded(&self, offset: u64) -> Option<&Chunks> {
        self.chunks.as_ref().filter(|chunks| chunks.is_coded_at(offset))
    }

    /// Returns the chunks if this byte is stored as it is, and is to be verified.
    pub(crate) fn checks(&self, offset: u64) -> Option<&Chunks> {
        self.chunks.as_ref().filter(|chunks| chunks.verify && !chunks.is_coded_at(offset))
    }

    /// Returns the offset in the stored file of a byte whose block is stored as it is.
    fn stored_offset(&self, offset: u64) -> u64 {
        offset.wrapping_sub(self.chunks.as_ref().map_or(0, |chunks| chunks.behind(offset)))
    }

    /// Returns the number of bytes that can be read: those of the decoded file.
    pub(crate) fn end(&self) -> u64 {
        let chunks = self.chunks.as_ref().filter(|chunks| chunks.is_coded());
        chunks.map_or(self.bytes, Chunks::decoded_bytes)
    }

    /// Fills `out` with bytes of the decoded file, and verifies those that have checksums.
    fn read_checked_at(&self, offset: u64, out: &mut [u8]) -> Result<(), StoreError> {
        let Some(checks) = &self.chunks else { return self.read_exact_at(offset, out) };
        let read = |offset, out: &mut [u8]| self.read_exact_at(offset, out);
        // Read damaged bytes again: they may have been damaged in transfer and not on the disk.
        if checks.read(offset, out, &read)?.is_none() {
            return Ok(());
        }
        match checks.read(offset, out, &read)? {
            None => Ok(()),
            Some(bad) => Err(self.corrupt(bad)),
        }
    }

    fn corrupt(&self, bad: BadChunk) -> StoreError {
        let BadChunk { offset, place, damage } = bad;
        StoreError::Corrupt { file: self.path.clone(), offset, place, damage }
    }

    fn read_exact_at(&self, offset: u64, out: &mut [u8]) -> Result<(), StoreError> {
        let mut done = 0;
        while done < out.len() {
            let position = offset.saturating_add(done as u64);
            match self.read_at(position, &mut out[done..]) {
                Ok(0) => {
                    return Err(StoreError::UnexpectedEnd {
                        file: self.path.clone(),
                        offset,
                        length: out.len() as u64,
                        file_bytes: position.min(self.bytes),
                    });
                }
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(StoreError::Read {
                        file: self.path.clone(),
                        offset: position,
                        source,
                    });
                }
            }
        }
        Ok(())
    }
}

impl DirectFile {
    /// Opens `path` with `O_DIRECT` and asks for its alignment. The error gives the reason why that is impossible.
    fn open(path: &Path) -> Result<DirectFile, String> {
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .map_err(|error| format!("its file system refuses O_DIRECT ({error})"))?;
        // tmpfs accepts the flag since Linux 6.6, but has no disk to read from.
        if fstatfs(&file).is_ok_and(|status| status.f_type == libc::TMPFS_MAGIC) {
            return Err("it lies in memory (tmpfs)".to_owned());
        }
        let wanted = StatxFlags::DIOALIGN;
        let alignment = match statx(&file, "", AtFlags::EMPTY_PATH, wanted) {
            Ok(status) if status.stx_mask & wanted.bits() != 0 => {
                if status.stx_dio_offset_align == 0 {
                    return Err("its file system has no direct reads".to_owned());
                }
                status.stx_dio_offset_align.max(status.stx_dio_mem_align) as usize
            }
            // Linux before 6.1 and some file systems do not report it. 4096 suits every disk.
            _ => SLOT_ALIGNMENT,
        };
        if !alignment.is_power_of_two() || alignment > SLOT_ALIGNMENT {
            return Err(format!("its direct reads need an alignment of {alignment} bytes"));
        }
        Ok(DirectFile { file: Arc::new(file), alignment })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(offset: u64, length: u64) -> Extent {
        Extent { file: FileIndex(0), offset, length }
    }

    #[test]
    fn reads_exactly_or_says_why_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, (0..=255).collect::<Vec<u8>>()).unwrap();
        let files = FileSet::open(&[&path]).unwrap();
        let mut out = [0; 4];
        files.read_exact(extent(250, 4), &mut out).unwrap();
        assert_eq!(out, [250, 251, 252, 253]);
        let too_far = files.read_exact(extent(253, 4), &mut out);
        assert!(matches!(too_far, Err(StoreError::UnexpectedEnd { file_bytes: 256, .. })));
        let absurd = files.read_exact(extent(u64::MAX, 4), &mut out);
        assert!(absurd.is_err());
        let other = Extent { file: FileIndex(1), offset: 0, length: 4 };
        assert!(matches!(files.read_exact(other, &mut out), Err(StoreError::UnknownFile { .. })));
        assert!(matches!(
            files.read_exact(extent(0, 5), &mut out),
            Err(StoreError::BufferLength { .. })
        ));
        assert!(files.alignment().is_power_of_two() && files.alignment() <= 4096);
    }

    #[test]
    fn only_regular_files_open() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(FileSet::open(&[folder.path()]), Err(StoreError::NotAFile { .. })));
        let missing = FileSet::open(&[folder.path().join("missing")]).unwrap_err();
        assert!(missing.to_string().contains("missing"), "{missing}");
    }

    #[test]
    fn memory_files_read_like_a_disk() {
        let files = FileSet::in_memory(vec![vec![7; 10]]);
        let mut out = [0; 4];
        files.read_exact(extent(6, 4), &mut out).unwrap();
        assert_eq!(out, [7; 4]);
        assert!(files.read_exact(extent(7, 4), &mut out).is_err());
    }
}
