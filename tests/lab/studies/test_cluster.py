"""cluster.py: what sharded calls cost, by all methods, and what its sentences say."""

from flashtile.lab.studies import cluster


def test_the_record():
    record = cluster.compute()
    assert record.holds and len(record.points) == len(cluster.CONTEXTS) * len(cluster.GPUS)
    few, many = record.points[0], record.points[-1]
    assert few.of("ulysses").exact and not many.of("ring").exact
    assert many.of("both").sent < many.of("ring").sent and many.of("ulysses") is None, "64 heads on 512 GPUs"
    assert many.best.ideal > 0.99
    assert any("do not fill" in text for text in cluster.findings(record))
    assert len(cluster.tables(record)[0].rows) == sum(len(point.methods) for point in record.points)
