//! One contract for all engines: every case here runs on io_uring, the pread pool and the simulated
//! disk.

mod copying;
mod faults;
mod loading;
mod reading;
mod relayout;
mod scheduling;
mod straight;
mod support;
mod tracing;
mod uploading;
