//! RAM as a device, for modules that run on the CPU.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use forebay_codec::Decoder;

use crate::device::{Device, DeviceError, Loaded};
use crate::rate::Rate;
use crate::weights::Arriving;

/// Weights begin at multiples of this, as those of PyTorch do: products round in another order elsewhere.
const MEMORY_ALIGNMENT: usize = 64;

/// Decoded weights of a group in RAM. They stay as long as this does, also when others have taken their place in the device.
pub struct HostMemory {
    words: Box<[u128]>,
    /// The bytes of the words that have weights.
    range: Range<usize>,
}

impl HostMemory {
    fn new(bytes: usize) -> HostMemory {
        let words = (bytes + MEMORY_ALIGNMENT).div_ceil(size_of::<u128>());
        let words = vec![0; words].into_boxed_slice();
        let memory: &[u8] = bytemuck::cast_slice(&words);
        let first = memory.as_ptr().align_offset(MEMORY_ALIGNMENT);
        HostMemory { words, range: first..first + bytes }
    }

    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.range.clone()]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[self.range.clone()]
    }
}

/// RAM for decoded weights. The range that a stream gives to a group stands for memory of its own, which is freed when the range goes to
/// another group and no caller has it any more.
#[derive(Default)]
pub struct HostDevice {
    places: Mutex<BTreeMap<u64, Arc<HostMemory>>>,
    rate: Rate,
}

impl HostDevice {
    pub fn new() -> HostDevice {
        HostDevice::default()
    }

    /// Returns the weights of the group that begins at this place.
    ///
    /// # Panics
    /// Panics if no group does.
    pub fn memory(&self, at: u64) -> Arc<HostMemory> {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(places.get(&at).expect("a group that is in use is there"))
    }
}

impl HostDevice {
    /// Lets the groups in a range leave, so that memory does not grow. Returns memory of one of them, if it has as many bytes and no caller
    /// has it: the system need not give its pages again.
    fn make_room(&self, range: &Range<u64>) -> Option<HostMemory> {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let before = places.range(..range.end).rev();
        let left = before.take_while(|(at, of)| **at + of.bytes().len() as u64 > range.start);
        let left: Vec<u64> = left.map(|(at, _)| *at).collect();
        let left: Vec<Arc<HostMemory>> = left.iter().filter_map(|at| places.remove(at)).collect();
        drop(places);
        let unused = left.into_iter().filter_map(Arc::into_inner);
        unused.filter(|memory| memory.bytes().len() as u64 == range.end - range.start).last()
    }
}

impl Device for HostDevice {
    type Weights = Arriving;
    /// Weights are decoded where they go, so none are staged.
    type Staged = Arriving;
    /// Weights in RAM are coded already.
    type Coded = Infallible;
    /// Any number: all work is done when its call returns.
    type Queue = u64;
    type Point = ();
    type Moment = Instant;

    fn reserved_bytes(&self) -> (u64, u64) {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        (places.values().map(|of| of.bytes().len() as u64).sum(), 0)
    }

    fn load(
        &self,
        weights: Arriving,
        to: Range<u64>,
        _: Option<Range<u64>>,
        _: &[()],
    ) -> Result<Loaded<HostDevice>, DeviceError> {
        let new = || HostMemory::new((to.end - to.start) as usize);
        let mut memory = self.make_room(&to).unwrap_or_else(new);
        let bytes = memory.bytes_mut();
        let mut decoder = Decoder::default();
        for chunk in weights {
            let chunk = chunk?;
            let began = Instant::now();
            chunk.decode_in(&mut decoder, bytes)?;
            self.rate.add(chunk.coded.len() as u64, began.elapsed());
        }
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.insert(to.start, Arc::new(memory));
        Ok(Loaded { ready: (), coded: None })
    }

    fn decode(&self, coded: &Infallible, _: Range<u64>, _: &[()]) -> Result<(), DeviceError> {
        match *coded {}
    }

    fn wait(&self, _: u64, (): &()) -> Result<(), DeviceError> {
        Ok(())
    }

    fn mark(&self, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }

    fn moment(&self, _: u64) -> Result<Instant, DeviceError> {
        Ok(Instant::now())
    }

    fn seconds_between(&self, first: &Instant, second: &Instant) -> Result<f64, DeviceError> {
        Ok(second.saturating_duration_since(*first).as_secs_f64())
    }

    fn bytes_per_second(&self) -> Option<f64> {
        self.rate.bytes_per_second()
    }

    fn is_reached(&self, (): &()) -> bool {
        true
    }

    fn reach(&self, (): &()) -> Result<(), DeviceError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::WeightSource;
    use crate::stored::{GroupTensor, TensorFrom};
    use crate::weights::{WeightOptions, WeightsBuilder};

    #[test]
    fn a_range_that_goes_to_another_group_frees_what_was_there() {
        let device = HostDevice::new();
        let options = WeightOptions { ram: u64::MAX, threads: 1, codes: true };
        let mut weights = WeightsBuilder::new(options);
        for byte in 1..=4 {
            let from = TensorFrom::Ram(&[byte; 1000]);
            weights.add(&[GroupTensor { from, weights: None }]).unwrap();
        }
        let weights = weights.finish().unwrap();
        let load = |group, at| device.load(weights.take(group).unwrap(), at..at + 1024, None, &[]);
        for (group, at) in [(0, 0), (1, 1024), (2, 2048)] {
            load(group, at).unwrap();
        }
        let old = device.memory(1024);
        assert!(old.bytes().as_ptr().addr().is_multiple_of(MEMORY_ALIGNMENT));
        load(3, 512).unwrap();
        assert_eq!(device.places.lock().unwrap().keys().copied().collect::<Vec<_>>(), [512, 2048]);
        assert_eq!((old.bytes()[0], device.memory(512).bytes()[999]), (2, 4), "old ones stay");
        assert_eq!(device.memory(2048).bytes()[..1000], [3; 1000]);
    }
}
