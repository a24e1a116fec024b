//! Words that the host and the device exchange with every batch. The host sends tokens and where they belong in the KV
//! cache, and gets flags and one row of logits back.

use forebay_cuda::{
    CudaError, CutPrompts, DeltaRuns, DevicePtr, Gpu, HostWords, PromptTiles, TOP_K_MAX,
};

use super::exchange_layout::ExchangeLayout;
use crate::backend::End;

/// Where a row of a batch belongs in the KV cache.
pub struct KvPlace {
    /// Position in the row's sequence.
    pub position: u32,
    /// Number of the sequence's tables, the same in every group of layers.
    pub table: u32,
}

/// Tiles of prompts for one shape of attention.
#[derive(Clone, Copy)]
struct TileRange {
    /// Number of words before the first tile.
    first: usize,
    count: usize,
    /// True if each has one part of its context.
    in_parts: bool,
}

/// Pinned copy of [`ExchangeLayout`]: first the words for the device, then the words for the host. The words of prompts are
/// apart, because generated tokens do not need them.
pub struct Exchange {
    words: HostWords,
    prompt_words: HostWords,
    /// Number of words of the current prompts.
    prompt_count: usize,
    /// Their tiles for each shape of attention. Empty if there are none.
    tiles: Vec<TileRange>,
    /// Number of words of all tiles.
    tile_words: usize,
    layout: ExchangeLayout,
    /// Device address of the exchanged words.
    device: DevicePtr<u32>,
    /// True if queued work may use the words.
    in_use: bool,
}

impl Exchange {
    pub fn new(
        gpu: &Gpu,
        layout: ExchangeLayout,
        device: DevicePtr<u32>,
    ) -> Result<Exchange, CudaError> {
        let mut words = gpu.host_words(layout.up_words() + layout.down_words())?;
        // Flags are cleared until a kernel sets them.
        words.write(layout.batch_words, &vec![u32::MAX; layout.flag_words]);
        let prompt_words = gpu.host_words(layout.prompt_words)?;
        Ok(Exchange {
            words,
            prompt_words,
            prompt_count: 0,
            tiles: Vec::new(),
            tile_words: 0,
            layout,
            device,
            in_use: false,
        })
    }

    pub fn tokens(&self) -> DevicePtr<u32> {
        self.device
    }

    pub fn positions(&self) -> DevicePtr<u32> {
        self.device.offset(self.layout.batch)
    }

    /// Returns the address of the number of each row's KV table.
    pub fn tables(&self) -> DevicePtr<u32> {
        self.device.offset(2 * self.layout.batch)
    }

    /// Returns the address of the runs of recurrent layers from number `first` on.
    pub fn state_runs(&self, first: usize) -> DevicePtr<u32> {
        self.device.offset(3 * self.layout.batch + first * DeltaRuns::WORDS)
    }

    /// Takes the runs of recurrent layers, as [`DeltaRuns`] has them. Call this after [`Exchange::take`]. There are as many as a
    /// pass can have, and those that it does not have get no rows.
    ///
    /// # Panics
    /// Panics if there are more runs than a pass can have.
    pub fn take_state_runs(&mut self, runs: impl Iterator<Item = [u32; DeltaRuns::WORDS]>) {
        let mut all = runs.chain(std::iter::repeat([0; DeltaRuns::WORDS]));
        let first = 3 * self.layout.batch;
        for run in 0..self.layout.state_runs {
            let words = all.next().expect("the iterator does not end");
            self.words.write(first + run * DeltaRuns::WORDS, &words);
        }
        let left = all.next();
        assert_eq!(left, Some([0; DeltaRuns::WORDS]), "{} runs", self.layout.state_runs);
    }

    /// Returns the tiles of the prompts for the attention with this number.
    pub fn tiles(&self, attention: usize) -> PromptTiles {
        let none = TileRange { first: 0, count: 0, in_parts: false };
        let TileRange { first, count, in_parts } = *self.tiles.get(attention).unwrap_or(&none);
        let words = self.device.offset(self.layout.prompts() + first);
        PromptTiles { words, count, in_parts }
    }

    /// Returns the address of the rows whose logits are wanted, for prompts.
    pub fn wanted(&self) -> DevicePtr<u32> {
        self.device.offset(self.layout.prompts() + self.tile_words)
    }

    /// Returns the address of a lane's flags. Word 0 is for the residual stream and the logits, followed by one word for
    /// each layer's router.
    pub fn flags(&self, lane: usize) -> DevicePtr<u32> {
        self.device.offset(self.layout.batch_words + lane * self.layout.lane_flags)
    }

    /// Returns the address of the ids of the largest logits. Their values follow the ids, and the rows' totals the values.
    pub fn largest(&self) -> DevicePtr<u32> {
        self.device.offset(self.layout.up_words())
    }

    /// Returns the address of the rows of logits.
    pub fn logits(&self) -> DevicePtr<f32> {
        self.largest().offset(self.layout.largest_words).cast()
    }

    /// Takes the tokens of a batch and their places in the KV cache. If an earlier batch may still use the words, waits
    /// for it.
    ///
    /// # Errors
    /// Returns an error if the device fails while an earlier batch is waited for.
    pub fn take(
        &mut self,
        gpu: &Gpu,
        tokens: &[u32],
        places: impl Iterator<Item = KvPlace>,
    ) -> Result<(), CudaError> {
        if self.in_use {
            gpu.synchronize()?;
        }
        self.in_use = true;
        self.words.write(0, tokens);
        for (row, KvPlace { position, table }) in (0..tokens.len()).zip(places) {
            self.words.write(self.layout.batch + row, &[position]);
            self.words.write(2 * self.layout.batch + row, &[table]);
        }
        self.tiles.clear();
        (self.tile_words, self.prompt_count) = (0, 0);
        Ok(())
    }

    /// Takes what only prompts need: tiles for each shape of attention, and the rows whose logits are wanted.
    pub fn take_prompts(&mut self, cuts: impl Iterator<Item = CutPrompts>, wanted: &[u32]) {
        for CutPrompts { tiles, in_parts } in cuts {
            let words = tiles.as_flattened();
            self.prompt_words.write(self.tile_words, words);
            let count = tiles.len();
            self.tiles.push(TileRange { first: self.tile_words, count, in_parts });
            self.tile_words += words.len();
        }
        self.prompt_words.write(self.tile_words, wanted);
        self.prompt_count = self.tile_words + wanted.len();
    }

    /// Marks the words as used again by the current batch.
    pub fn use_again(&mut self) {
        self.in_use = true;
    }

    /// Queues kernels that copy tokens, their places, cleared flags and what prompts need to the device. A queued copy would wait behind
    /// copies of sub-layers for the next pass, which take many milliseconds.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn queue_up(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.read_words(&self.words, 0..self.layout.up_words(), self.device)?;
        if self.prompt_count > 0 {
            let to = self.device.offset(self.layout.prompts());
            gpu.read_words(&self.prompt_words, 0..self.prompt_count, to)?;
        }
        Ok(())
    }

    /// Queues the copy of the flags, and of the results that `end` asks for `rows` rows, to the host. There are logits of
    /// one row at most.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn queue_down(&self, gpu: &Gpu, end: End, rows: usize) -> Result<(), CudaError> {
        let words = match end {
            End::Nothing | End::Selected => self.layout.flag_words,
            End::Largest(count) => self.layout.flag_words + 2 * count * rows,
            End::Logits => self.layout.down_words(),
        };
        let first = self.layout.up_words();
        gpu.queue_download(self.flags(0), &self.words, first..first + words)
    }

    /// Queues the copy of the flags, and of the `count` largest logits and the totals of `rows` rows, to the host.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn queue_selected(&self, gpu: &Gpu, count: usize, rows: usize) -> Result<(), CudaError> {
        let first = self.layout.up_words();
        let words = self.layout.flag_words + (2 * count + 1) * rows;
        gpu.queue_download(self.flags(0), &self.words, first..first + words)
    }

    /// Waits for all queued work and reads the flags.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn wait(&mut self, gpu: &Gpu, flags: &mut [u32]) -> Result<(), CudaError> {
        gpu.synchronize()?;
        self.in_use = false;
        self.words.read(self.layout.up_words(), flags);
        Ok(())
    }

    /// Appends the row of logits that was copied together with the last flags.
    pub fn append_row(&self, logits: &mut Vec<f32>) {
        let first = self.layout.up_words() + self.layout.flag_words + self.layout.largest_words;
        self.words.append(first, self.layout.vocabulary, logits);
    }

    /// Returns the total of a row of `rows`, which was copied together with the last flags and the `count` largest logits.
    pub fn total(&self, count: usize, rows: usize, row: usize) -> f32 {
        let mut total = [0.0_f32];
        let first = self.layout.up_words() + self.layout.flag_words;
        self.words.read(first + 2 * count * rows + row, &mut total);
        total[0]
    }

    /// Appends the `count` largest logits of each of `rows` rows, which were copied together with the last flags.
    pub fn append_largest(&self, count: usize, rows: usize, largest: &mut Vec<(f32, u32)>) {
        let (mut ids, mut values) = ([0_u32; TOP_K_MAX], [0.0_f32; TOP_K_MAX]);
        let first = self.layout.up_words() + self.layout.flag_words;
        for row in 0..rows {
            self.words.read(first + row * count, &mut ids[..count]);
            self.words.read(first + (rows + row) * count, &mut values[..count]);
            largest.extend(values.into_iter().zip(ids).take(count));
        }
    }
}
