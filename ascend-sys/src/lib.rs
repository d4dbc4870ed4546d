//! Raw declarations and run-time loader of AscendCL.
