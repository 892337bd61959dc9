def take(record, models, work):
    pass
