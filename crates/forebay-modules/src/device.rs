//! What a device does for the stream of weights.

use std::fmt;
use std::ops::Range;

/// A device with memory, and queues of work that run side by side. Work of one queue runs in order, and begins behind the points of
/// other queues that it waits for. A caller never waits for the device, except in [`Device::reach`] and for memory of the host.
pub trait Device: Send + Sync + 'static {
    /// Weights of a group outside the device, coded or plain. They may be on their way from a disk.
    type Weights;
    /// The same weights, of which some may have been brought near their memory. What is not used gives back what it took up.
    type Staged: From<Self::Weights> + Send;
    /// Weights that stay in the memory of the device coded, as they were brought.
    type Coded: Send;
    /// A queue of the caller, such as a stream of the library that computes.
    type Queue: Copy + PartialEq + Send + fmt::Debug;
    /// A point in a queue. It is reached when all work before it is done.
    type Point: Clone + Send + 'static;
    /// A moment in a queue whose time can be compared with that of others.
    type Moment: Send + 'static;

    /// Returns the bytes that the device has reserved for weights, and those of pinned memory.
    fn reserved_bytes(&self) -> (u64, u64) {
        (0, 0)
    }

    /// Returns how many bytes of weights can be staged, as they are outside of the device.
    fn stage_bytes(&self) -> u64 {
        0
    }

    /// Returns true if there is room for weights that are staged.
    fn can_stage(&self) -> bool {
        false
    }

    /// Brings weights near the device, before they have a range of its memory, as far as there is room for them. Returns true if all are staged. May wait
    /// for memory of the host, and for the disk.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be read or the device fails.
    fn stage(&self, weights: &mut Self::Staged) -> Result<bool, DeviceError> {
        let _ = weights;
        Ok(false)
    }

    /// Queues the work that brings weights into a range of the memory, which is as long as the weights when they are decoded. The
    /// range may be written when `after` is reached, and so may `keep`, which gets a copy of the coded weights if it has room for it. Returns the point
    /// at which the weights are there. May wait for memory of the host, and for the disk. Loads and decodes of a group run in the order of their calls.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be read or the device fails. The range then holds anything, and nothing writes to
    /// it any more.
    fn load(
        &self,
        weights: Self::Staged,
        to: Range<u64>,
        keep: Option<Range<u64>>,
        after: &[Self::Point],
    ) -> Result<Loaded<Self>, DeviceError>;

    /// Returns true if weights can stay coded in the memory.
    fn can_keep_coded(&self) -> bool {
        false
    }

    /// Queues the work that decodes weights to a range of the memory, which may be written when `after` is reached. Returns the point at which they
    /// are there.
    ///
    /// # Errors
    /// Returns an error if the device fails. The range then holds anything, and nothing writes to it any more.
    fn decode(
        &self,
        coded: &Self::Coded,
        to: Range<u64>,
        after: &[Self::Point],
    ) -> Result<Self::Point, DeviceError>;

    /// Lets work that is queued from now on begin behind a point.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn wait(&self, queue: Self::Queue, point: &Self::Point) -> Result<(), DeviceError>;

    /// Returns the point behind all work that is queued so far.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn mark(&self, queue: Self::Queue) -> Result<Self::Point, DeviceError>;

    /// Returns the moment at which all work that is queued so far is done.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn moment(&self, queue: Self::Queue) -> Result<Self::Moment, DeviceError>;

    /// Waits for both moments, and returns the seconds between them.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn seconds_between(
        &self,
        first: &Self::Moment,
        second: &Self::Moment,
    ) -> Result<f64, DeviceError>;

    /// Returns how many bytes outside of the device a second brings into it, if anything was brought yet.
    fn bytes_per_second(&self) -> Option<f64>;

    /// Notes for which part of the work of a pass weights are brought. More than 1 means that passes wait for them.
    fn pace(&self, part: f64) {
        let _ = part;
    }

    /// Returns how many coded bytes a second decodes while nothing else is computed, if that is known.
    fn decoded_bytes_per_second(&self) -> Option<f64> {
        None
    }

    /// Returns true if a point is reached.
    fn is_reached(&self, point: &Self::Point) -> bool;

    /// Waits until a point is reached.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn reach(&self, point: &Self::Point) -> Result<(), DeviceError>;
}

/// Weights whose load is queued: the point at which they are there, and what stays coded.
pub struct Loaded<D: Device + ?Sized> {
    pub ready: D::Point,
    pub coded: Option<D::Coded>,
}

/// An error of a device or of the source of weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error("{0}")]
    Device(String),
    /// Weights cannot be read, or are damaged.
    #[error("{0}")]
    Source(String),
    /// RAM is too small.
    #[error(
        "{needed} bytes of RAM are needed for weights that are not in files, and to read the others, but there are {has}"
    )]
    Ram { needed: u64, has: u64 },
}

impl DeviceError {
    /// Tells an error of a device.
    pub fn of_device(error: &dyn fmt::Display) -> DeviceError {
        DeviceError::Device(error.to_string())
    }

    /// Tells an error of the source of weights.
    pub fn of_source(error: &dyn fmt::Display) -> DeviceError {
        DeviceError::Source(error.to_string())
    }
}
