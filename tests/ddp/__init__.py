"""Tests of DistributedDataParallel; `common` is what several of their files use."""
